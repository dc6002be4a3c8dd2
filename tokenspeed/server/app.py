"""The ASGI application: a list of routes under a few layers of middleware."""

from __future__ import annotations

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from tokenspeed.server import openapi
from tokenspeed.server.api import APIS, ApiEndpoint
from tokenspeed.server.asgi import send_json
from tokenspeed.server.calls import CALLS, CallEndpoint
from tokenspeed.server.cors import with_cors
from tokenspeed.server.info import Endpoint, info_routes
from tokenspeed.server.middleware import Authenticate, LimitHead, Observe, OriginForm
from tokenspeed.server.page_routes import page_routes
from tokenspeed.server.state import ServerState


def create_app(state: ServerState) -> ASGIApp:
    """The API of one engine, to be served or mounted."""
    server = state.config.server
    routes = [Route(path, ApiEndpoint(state, api), methods=["POST"]) for path, api in APIS.items()]
    calls = {
        call.path: Route(call.path, CallEndpoint(state, call), methods=["POST"]) for call in CALLS
    }
    admin = [calls[call.path] for call in CALLS if call.is_admin]
    routes += calls.values()
    routes += [*info_routes(state), *page_routes(state)]
    routes.append(Route(openapi.PATH, Endpoint(state, {"GET": _openapi}), methods=["GET"]))
    router = Router(routes, redirect_slashes=False, default=_no_route)
    checked = Authenticate(router, state.keys, state.shared.places, admin)
    app = LimitHead(checked, server.max_header_bytes)
    return with_cors(server, OriginForm(Observe(app, state.metrics, server, routes)))


async def _openapi(state: ServerState, scope: Scope, send: Send) -> None:
    await send_json(send, openapi.document())


async def _no_route(scope: Scope, receive: Receive, send: Send) -> None:
    raise HTTPException(404)
