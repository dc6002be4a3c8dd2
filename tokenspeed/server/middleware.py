"""What every HTTP request passes on its way to a route: an id, a key check, and a place on record.

Without keys the API is open. With keys, every route asks for one but those in OPEN_PATHS: probes
and scrapers send none, nor does a browser that opens the page, and these show no more than the
model's name and load. Routes of whoever runs the server ask for the operator's key, for any where
the operator has none, and are refused where there are no keys at all: anybody could ask.
"""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Sequence
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenspeed.log import logger
from tokenspeed.server.asgi import Body, ClientGone, header, send_json
from tokenspeed.server.client_address import TrustedProxies
from tokenspeed.server.errors import APIError, as_api_error, body_for, overloaded, shorten
from tokenspeed.server.key_places import KeyPlaces
from tokenspeed.server.keys import Key, Keys
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.page_routes import PAGE_PATHS
from tokenspeed.server_config import ServerConfig

PROBES = frozenset({"/health", "/ping", "/ready", "/metrics"})
"""Asked every few seconds by machines: their lines are on the log at level debug only."""
OPEN_PATHS = PROBES | PAGE_PATHS

_ABSOLUTE = re.compile(rb"https?://[^/?#]+", re.IGNORECASE)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
_REASONS = {404: "Not found: {method} {path}", 405: "{method} is not allowed on {path}"}
CLIENT_CLOSED = 499


class Authenticate:
    """Lets requests with one of `keys` through, in one of the two headers that clients use, and of
    each key no more at once than it has `places`. A request is one, whatever it asks for, from its
    headers to the end of its answer. The `admin` routes are the operator's.
    """

    def __init__(
        self, app: ASGIApp, keys: Keys, places: KeyPlaces, admin: Sequence[BaseRoute]
    ) -> None:
        self._app, self._keys, self._places, self._admin = app, keys, places, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or _path(scope) in OPEN_PATHS or self._is_free(scope):
            await self._app(scope, receive, send)
            return
        key = self._key(scope)
        if key is None:
            raise _no_key("a valid API key")
        most = key.max_requests
        if most is None:
            await self._app(scope, receive, send)
            return
        async with self._places.hold(key.digest, most) as is_held:
            if not is_held:
                raise overloaded(
                    f"This API key has all its requests in work: {most} are taken at once "
                    "(max_requests in the file of keys). Retry later."
                )
            await self._app(scope, receive, send)

    def _is_free(self, scope: Scope) -> bool:
        """Whether no client's key is needed. Raises APIError for what is the operator's alone."""
        # As the router finds it, so that no spelling of a path comes to a route unseen.
        if all(route.matches(scope)[0] is Match.NONE for route in self._admin):
            return not self._keys.are_asked
        if self._keys.operator_has_own:
            self._require_admin(scope)
        elif not self._keys.are_asked:
            raise APIError(
                403, "This needs a server with a key (--admin-api-key).", code="key_required"
            )
        return self._keys.operator_has_own

    def _require_admin(self, scope: Scope) -> None:
        are_admin = [self._keys.is_admin(each) for each in _sent_keys(scope)]
        if any(are_admin):
            return
        if self._key(scope) is None:
            raise _no_key("the operator's key (--admin-api-key)")
        raise APIError(
            403, "This needs the operator's key (--admin-api-key).", code="admin_key_required"
        )

    def _key(self, scope: Scope) -> Key | None:
        bearer, other = map(self._keys.match, _sent_keys(scope))  # both, whatever the first says
        return bearer or other


def _sent_keys(scope: Scope) -> tuple[str, str]:
    scheme, _, bearer = (header(scope, b"authorization") or "").partition(" ")
    other = header(scope, b"x-api-key") or ""
    return bearer.strip() if scheme.lower() == "bearer" else "", other.strip()


def _no_key(what: str) -> APIError:
    return APIError(
        401,
        f"Send {what} as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


class LimitHead:
    """Refuses a path and headers that are larger than `most` bytes together."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app, self._most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _head_bytes(scope) > self._most:
            raise APIError(
                431, f"Path and headers are larger than {self._most} bytes (--max-header-bytes)."
            )
        await self._app(scope, receive, send)


def _head_bytes(scope: Scope) -> int:
    fields = sum(len(name) + len(value) + len(": \r\n") for name, value in scope["headers"])
    return fields + len(scope["path"]) + len(scope.get("query_string", b""))


def _path(scope: Scope) -> str:
    """The path as the routes know it."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class OriginForm:
    """Takes a target that is a whole URL, as clients of proxies send it, for the path that it names
    (RFC 9112, 3.2.2). Whose host it names is no matter here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            raw: bytes = scope.get("raw_path") or b""
            prefix = _ABSOLUTE.match(raw)
            if prefix is not None:
                raw = raw[prefix.end() :] or b"/"
                scope = {**scope, "raw_path": raw, "path": unquote(raw.decode("ascii"))}
        await self._app(scope, receive, send)


class Observe:
    """The outermost layer: gives each request an id, answers errors, counts and logs what was sent.

    Every exception ends here. Websockets are refused; lifespan events pass. `routes` name what is
    refused before it is routed: a path itself may hold what is as good as a key.
    """

    def __init__(
        self, app: ASGIApp, metrics: Metrics, server: ServerConfig, routes: Sequence[BaseRoute]
    ) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes
        self._log_requests = server.enable_log_requests
        self._proxies = TrustedProxies(server.forwarded_allow_ips)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # With an "app" in its scope, the router raises for 404 and 405, which ends as JSON here.
        scope.setdefault("app", self)
        began = time.monotonic()
        given = header(scope, b"x-request-id") or ""
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        answer = _Answer(send, request_id)
        status = await self._answer(scope, receive, answer)
        path = self._route_of(scope)
        seconds = time.monotonic() - began
        self._metrics.http_request(path, scope["method"], status, seconds)
        if self._log_requests:
            client, method = self._proxies.client_of(scope), scope["method"][:16]
            level = logging.DEBUG if path in PROBES else logging.INFO
            line = "%s %s %s %d %.3f s %s"
            logger.log(level, line, client, method, path, status, seconds, request_id)

    def _route_of(self, scope: Scope) -> str:
        """The path of the route, as it is declared."""
        route = scope.get("route")
        if route is None:
            matching = (each for each in self._routes if each.matches(scope)[0] is not Match.NONE)
            route = next(matching, None)
        return route.path if isinstance(route, Route) else "unmatched"

    async def _answer(self, scope: Scope, receive: Receive, answer: _Answer) -> int:
        body = Body(receive)
        try:
            await self._app(scope, body.receive, answer.send)
        except ClientGone:
            return CLIENT_CLOSED
        except Exception as error:
            shown = _as_shown(error, scope, answer.request_id)
            if answer.status is None:
                await body.discard()
                body_sent = body_for(_path(scope), shown)
                await send_json(answer.send, body_sent, shown.status, shown.headers)
        return answer.status or 500


class _Answer:
    """Sends one answer: notes its status and adds the request's id to its headers."""

    def __init__(self, send: Send, request_id: str) -> None:
        self.request_id = request_id
        self.status: int | None = None
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", []), (b"x-request-id", self.request_id.encode())]
            message = {**message, "headers": headers}
        await self._send(message)


def _as_shown(error: Exception, scope: Scope, request_id: str) -> APIError:
    """Starlette's own refusals (no such route or method) in OpenAI's shape."""
    if not isinstance(error, HTTPException):
        return as_api_error(error, f"request {request_id}")
    reason = _REASONS.get(error.status_code, "{method} {path} cannot be served")
    message = reason.format(method=scope["method"], path=shorten(scope["path"], 100))
    return APIError(error.status_code, message, headers=dict(error.headers or {}))
