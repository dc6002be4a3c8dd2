"""Which web pages' scripts may call the API (CORS): browsers ask, and obey the answer."""

from __future__ import annotations

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from tokenspeed.server_config import ServerConfig

_SHOWN = ("X-Request-Id", "Retry-After")
"""Headers of answers that scripts may read."""


def with_cors(server: ServerConfig, app: ASGIApp) -> ASGIApp:
    """`app` behind --allowed-origins; `app` itself if there are none. It has to be outermost: error
    answers need the headers too, and a browser asks first without a key.
    """
    if not server.allowed_origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=server.allowed_origins,
        allow_methods=server.allowed_methods or ("*",),
        allow_headers=server.allowed_headers or ("*",),
        allow_credentials=server.allow_credentials,
        expose_headers=_SHOWN,
    )
