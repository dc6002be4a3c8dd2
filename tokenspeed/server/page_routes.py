"""The page at `/`: a chat over the API, and how the server does. Off with --disable-page.

Its files (`page/`) are served as they are, under a policy that lets the browser load nothing from
elsewhere and run nothing that is not one of them. They hold nothing that is secret, and the figures
are those of /metrics and /ready, so all of them are open; the API asks the page for a key as it
does anybody.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tokenspeed.engine.messages import Stats
from tokenspeed.engine.phases import Phase
from tokenspeed.server.asgi import send_body, send_json
from tokenspeed.server.info import Endpoint
from tokenspeed.server.state import ServerState

FOLDER = Path(__file__).parent / "page"

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}

FILES = {
    "/": "index.html",
    **{
        f"/page/{name}": name
        for name in ("page.css", "icon.svg", "chat.js", "events.js", "load.js")
    },
}
STATUS = "/page/status"
PAGE_PATHS = frozenset({*FILES, STATUS})

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class PageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What the page shows beside the chat. `time`: seconds on a clock that only goes forward, so
    that two of these make rates.
    """

    time: float
    models: tuple[str, ...]
    needs_key: bool
    phase: str
    detail: str
    phases: list[Phase]
    stats: Stats


@dataclass(frozen=True)
class PageFile:
    """One file, read once, as an ASGI application."""

    body: bytes
    content_type: bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send_body(send, self.body, self.content_type, headers=HEADERS)


async def status(state: ServerState, scope: Scope, send: Send) -> None:
    phase = state.phase
    answer = PageStatus(
        time=time.monotonic(),
        models=tuple(state.names),
        needs_key=state.keys.are_asked,
        phase=phase,
        detail=state.loading_detail if phase == "loading" else "",
        phases=state.client.phases.phases,
        stats=state.client.stats,
    )
    await send_json(send, msgspec.json.encode(answer), headers=HEADERS)


def page_routes(state: ServerState) -> list[Route]:
    """No routes if the page is switched off."""
    if state.config.server.disable_page:
        return []
    files = [
        Route(path, PageFile(_read(name), _TYPES[Path(name).suffix]), methods=["GET"])
        for path, name in FILES.items()
    ]
    return [*files, Route(STATUS, Endpoint(state, {"GET": status}), methods=["GET"])]


def _read(name: str) -> bytes:
    return (FOLDER / name).read_bytes()
