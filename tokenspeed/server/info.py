"""Routes that are asked without a body: models, health, readiness, version, metrics, and what is
kept.

/health is about the process (200 with an empty body unless the engine is dead), /ready about new
work (200 only when it would be taken; else 503 with the phase). /ready?level=graphs also waits for
the CUDA graphs that a server records when it is ready already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.config import GROUPS
from tokenspeed.options import options_of
from tokenspeed.server import responses
from tokenspeed.server.asgi import send_body, send_json
from tokenspeed.server.errors import bad_request, unsupported
from tokenspeed.server.protocol_responses import DeletedResponse, Response
from tokenspeed.server.state import ServerState

Handler = Callable[[ServerState, Scope, Send], Awaitable[None]]


@dataclass(frozen=True)
class InfoRoute:
    """What is asked for without a body. `answer` None: the answer is no JSON, or has no body."""

    method: str
    path: str
    summary: str
    handler: Handler
    answer: type[msgspec.Struct] | None = None


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "model"
    created: int
    owned_by: str = "tokenspeed"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: str = "list"


READY_LEVELS = ("serving", "graphs")
"""What /ready?level= may ask for: that requests are served, or also that all CUDA graphs exist."""


class Readiness(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    phase: str = ""
    detail: str = ""


class Version(msgspec.Struct, frozen=True):
    version: str


class Endpoint:
    """Handlers that need no body, by method, as an ASGI application."""

    def __init__(self, state: ServerState, handlers: Mapping[str, Handler]) -> None:
        self._state, self.handlers = state, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        await self.handlers[method](self._state, scope, send)


def _query(scope: Scope) -> dict[str, list[str]]:
    return parse_qs(scope["query_string"].decode("latin-1"))


async def models(state: ServerState, scope: Scope, send: Send) -> None:
    await send_json(send, msgspec.json.encode(ModelList([_card(state, n) for n in state.names])))


async def model(state: ServerState, scope: Scope, send: Send) -> None:
    name = state.model_name(scope["path_params"]["id"])
    await send_json(send, msgspec.json.encode(_card(state, name)))


def _card(state: ServerState, name: str) -> ModelCard:
    ready, _ = state.require_ready()
    return ModelCard(
        id=name,
        created=state.shared.created,
        root=state.names[0],
        max_model_len=ready.max_model_len,
    )


async def health(state: ServerState, scope: Scope, send: Send) -> None:
    await send_body(send, b"", b"text/plain", 503 if state.phase == "dead" else 200)


async def ready(state: ServerState, scope: Scope, send: Send) -> None:
    level = _query(scope).get("level", ["serving"])[-1]
    if level not in READY_LEVELS:
        raise bad_request(f"level is one of {', '.join(READY_LEVELS)}", "level")
    graphs = state.client.stats.graphs_to_come if level == "graphs" else 0
    if state.phase == "ready" and graphs:
        answer = Readiness("loading", "graphs", f"{graphs} CUDA graphs to come")
        await send_json(send, msgspec.json.encode(answer), 503, {"Retry-After": "5"})
        return
    if state.phase == "ready":
        await send_json(send, msgspec.json.encode(Readiness("ready")))
        return
    progress = state.client.progress if state.phase == "loading" else None
    answer = Readiness(
        state.phase, progress.phase if progress else "", progress.detail if progress else ""
    )
    await send_json(send, msgspec.json.encode(answer), 503, {"Retry-After": "5"})


async def version(state: ServerState, scope: Scope, send: Send) -> None:
    await send_json(send, msgspec.json.encode(Version(__version__)))


async def metrics(state: ServerState, scope: Scope, send: Send) -> None:
    await send_body(send, await state.metrics.scrape(), b"text/plain; version=0.0.4; charset=utf-8")


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`settings` by group, as they are in effect, without those that are secret; `reasons`: why
    those that were left open are what they are, or stay open (what is measured: see `engine`).
    """

    version: str
    models: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    num_pages: int
    block_size: int
    kv_cache_dtype: str
    engine: str
    settings: dict[str, dict[str, Any]]
    reasons: dict[str, str]


async def server_info(state: ServerState, scope: Scope, send: Send) -> None:
    ready, _ = state.require_ready()
    settings: dict[str, dict[str, Any]] = {}
    for name, kind in GROUPS.items():
        # The engine knows nothing of the HTTP side's, nor does that side settle the others.
        group = getattr(state.config if name == "server" else ready.settings, name)
        shown = [option for option in options_of(kind) if not option.secret]
        settings[name] = {option.name: getattr(group, option.name) for option in shown}
    answer = ServerInfo(
        version=__version__,
        models=tuple(state.names),
        max_model_len=ready.max_model_len,
        vocab_size=ready.vocab_size,
        num_pages=ready.num_pages,
        block_size=ready.block_size,
        kv_cache_dtype=ready.kv_cache_dtype,
        engine=ready.summary,
        settings=settings,
        reasons=ready.reasons,
    )
    await send_json(send, msgspec.json.encode(answer))


async def response(state: ServerState, scope: Scope, send: Send) -> None:
    if any(value.lower() == "true" for value in _query(scope).get("stream", ())):
        raise unsupported("stream", "a response that has ended is given whole")
    await send_json(send, await responses.stored(state, scope["path_params"]["id"]))


async def delete_response(state: ServerState, scope: Scope, send: Send) -> None:
    id = scope["path_params"]["id"]
    await responses.delete(state, id)
    await send_json(send, msgspec.json.encode(DeletedResponse(id)))


RESPONSE = "/v1/responses/{id}"
INFO_ROUTES = (
    InfoRoute("GET", "/v1/models", "Names that are served", models, ModelList),
    InfoRoute("GET", "/v1/models/{id:path}", "One of them", model, ModelCard),
    InfoRoute("GET", RESPONSE, "A response that is kept", response, Response),
    InfoRoute("DELETE", RESPONSE, "Forget a response", delete_response, DeletedResponse),
    InfoRoute("GET", "/health", "Whether the process lives", health),
    InfoRoute("GET", "/ping", "As /health", health),
    InfoRoute("GET", "/ready", "Whether new requests are taken", ready, Readiness),
    InfoRoute("GET", "/version", "The server's version", version, Version),
    InfoRoute("GET", "/server_info", "Model, engine and settings", server_info, ServerInfo),
    InfoRoute("GET", "/metrics", "Prometheus", metrics),
)


def info_routes(state: ServerState) -> list[Route]:
    handlers: dict[str, dict[str, Handler]] = {}
    for route in INFO_ROUTES:
        handlers.setdefault(route.path, {})[route.method] = route.handler
    return [
        Route(path, Endpoint(state, by_method), methods=list(by_method))
        for path, by_method in handlers.items()
    ]
