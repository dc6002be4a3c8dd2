"""Hypercorn, behind an interface small enough to put another server in its place."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Any, cast

import hypercorn.asyncio
from hypercorn.config import Config as HypercornConfig
from starlette.types import ASGIApp

from tokenspeed.log import logger
from tokenspeed.server.listener import BACKLOG
from tokenspeed.server_config import ServerConfig

KEEP_ALIVE_S = 75.0
HANDSHAKE_S = 20
CLOSE_S = 3.0
"""How long connections may take to close when the server stops."""


class HttpServer:
    """Serves `app` on `listener`, which it owns, from now until `stop`; through TLS if `tls` is
    given.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ServerConfig,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(
            hypercorn.asyncio.serve(
                cast(Any, app),  # Hypercorn has narrower types of its own for the same thing
                _settings(listener.detach(), limits, tls),
                shutdown_trigger=self._stopping.wait,
                mode="asgi",
            )
        )

    async def ended(self) -> None:
        """Wait for the server to end by itself, which it should not; then raise."""
        await asyncio.shield(self._task)
        raise RuntimeError("the HTTP server ended by itself")

    async def stop(self) -> None:
        """Close the listener and all connections; give up on those that do not close in time.

        Hypercorn's own limit does not hold on Python 3.12 and later, where it waits for every
        connection first. What is given up ends with the event loop, which cancels each task.
        """
        # Connections that are cut complain to the loop of their cancellation.
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: logger.debug("while closing: %s", context["message"])
        )
        self._stopping.set()
        await asyncio.wait({self._task}, timeout=CLOSE_S + 1.0)
        self._task.cancel()
        done, _ = await asyncio.wait({self._task}, timeout=1.0)
        for task in done:
            if not task.cancelled() and task.exception() is not None:
                logger.debug("the HTTP server ended with %r", task.exception())


class _Settings(HypercornConfig):
    """With a TLS context that was made elsewhere."""

    tls: ssl.SSLContext | None = None

    @property
    def ssl_enabled(self) -> bool:
        return self.tls is not None

    def create_ssl_context(self) -> ssl.SSLContext | None:
        return self.tls


def _settings(
    listener_fd: int, limits: ServerConfig, tls: ssl.SSLContext | None
) -> HypercornConfig:
    """Limits for many long streams; what Hypercorn itself says is shown from warnings on."""
    log = logger.getChild("http")
    log.setLevel(logging.WARNING)
    settings = _Settings()
    settings.tls = tls
    settings.ssl_handshake_timeout = HANDSHAKE_S
    # The application refuses larger heads, and says why; what it is never shown is larger still.
    settings.h11_max_incomplete_size = 2 * limits.max_header_bytes
    settings.h2_max_header_list_size = 2 * limits.max_header_bytes
    settings.bind = [f"fd://{listener_fd}"]
    settings.errorlog = log
    settings.backlog = BACKLOG
    settings.keep_alive_timeout = KEEP_ALIVE_S
    settings.keep_alive_max_requests = 1 << 30
    settings.h2_max_concurrent_streams = 1000
    settings.include_server_header = False
    settings.graceful_timeout = CLOSE_S
    return settings
