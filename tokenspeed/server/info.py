"""Routes that say what is served and how it goes: models, health, readiness, version, metrics.

/health is about the process (200 with an empty body unless the engine is dead), /ready about new
work (200 only when it would be taken; else 503 with the phase). /ready?level=graphs also waits for
the CUDA graphs that a server records when it is ready already.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from urllib.parse import parse_qs

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenspeed import __version__
from tokenspeed.server.asgi import send_body, send_json
from tokenspeed.server.errors import bad_request
from tokenspeed.server.state import ServerState

Handler = Callable[[ServerState, Scope, Send], Awaitable[None]]


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


class Endpoint:
    """A handler that needs no body, as an ASGI application."""

    def __init__(self, state: ServerState, handler: Handler) -> None:
        self._state, self._handler = state, handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(self._state, scope, send)


async def models(state: ServerState, scope: Scope, send: Send) -> None:
    await send_json(send, msgspec.json.encode(ModelList([_card(state, n) for n in state.names])))


async def model(state: ServerState, scope: Scope, send: Send) -> None:
    name = state.model_name(scope["path_params"]["id"])
    await send_json(send, msgspec.json.encode(_card(state, name)))


def _card(state: ServerState, name: str) -> ModelCard:
    ready, _ = state.require_ready()
    return ModelCard(
        id=name, created=state.created, root=state.names[0], max_model_len=ready.max_model_len
    )


async def health(state: ServerState, scope: Scope, send: Send) -> None:
    await send_body(send, b"", b"text/plain", 503 if state.phase == "dead" else 200)


async def ready(state: ServerState, scope: Scope, send: Send) -> None:
    level = parse_qs(scope["query_string"].decode("latin-1")).get("level", ["serving"])[-1]
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
    await send_json(send, msgspec.json.encode({"version": __version__}))


async def metrics(state: ServerState, scope: Scope, send: Send) -> None:
    await send_body(send, state.metrics.render(), b"text/plain; version=0.0.4; charset=utf-8")


HANDLERS: dict[str, Handler] = {
    "/v1/models": models,
    "/v1/models/{id:path}": model,
    "/health": health,
    "/ping": health,
    "/ready": ready,
    "/version": version,
    "/metrics": metrics,
}


def info_routes(state: ServerState) -> list[Route]:
    return [
        Route(path, Endpoint(state, handler), methods=["GET"]) for path, handler in HANDLERS.items()
    ]
