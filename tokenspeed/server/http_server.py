"""Hypercorn's connections on a listener of ours, behind an interface small enough to put another
server in its place.

Accepting and stopping are done here: Hypercorn's own shutdown waits for open connections, on Python
3.12 and later without limit. So are writes, of which there is one a token and stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import h11
from hypercorn.asyncio.tcp_server import TCPServer
from hypercorn.asyncio.worker_context import WorkerContext
from hypercorn.config import Config as HypercornConfig
from hypercorn.events import Closed, Event, RawData, Updated
from hypercorn.protocol.h11 import H11Protocol
from hypercorn.typing import LifespanState
from starlette.types import ASGIApp, Message, Scope, Send

from tokenspeed.log import logger
from tokenspeed.server.asgi import ClientGone
from tokenspeed.server.empty_lines import PatientConnection
from tokenspeed.server.listener import BACKLOG
from tokenspeed.server_config import ServerConfig

KEEP_ALIVE_S = 75.0
HANDSHAKE_S = 20
CLOSE_S = 3.0
"""How long connections may take to close when the server stops."""
BEHIND_BYTES = 1 << 16
"""A connection that has more than this to send is behind: its writers wait."""
_FRAMED = {b"content-length", b"transfer-encoding"}
"""Headers without which an answer over HTTP/1.1 comes in chunks."""
CHECKS_PER_STALL = 8
"""While they wait, a stall is looked for so many times in its limit."""


class HttpServer:
    """Serves `app` on `listener`, which it owns, from now until `stop`; through TLS if `tls` is
    given. A client is cut when its socket takes nothing for `--write-timeout`, however slow it is
    otherwise.
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        limits: ServerConfig,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._stall_s = limits.write_timeout
        self._app = app
        self._settings = _settings(limits)
        self._tls = tls
        self._context = WorkerContext(None)
        self._connections: set[asyncio.Task[None]] = set()
        self._task = asyncio.create_task(self._accept(listener))

    async def ended(self) -> None:
        """Wait for the server to end by itself, which it should not; then raise."""
        await asyncio.shield(self._task)
        raise RuntimeError("the HTTP server ended by itself")

    async def stop(self) -> None:
        """Close the listener and all connections; give up on those that do not close in time."""
        # Connections that are cut complain to the loop of their cancellation.
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: logger.debug("while closing: %s", context["message"])
        )
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        await self._context.terminated.set()  # idle connections close by themselves
        for seconds in (CLOSE_S, 1.0):
            if self._connections:
                await asyncio.wait(self._connections, timeout=seconds)
            for task in self._connections:
                task.cancel()

    async def _accept(self, listener: socket.socket) -> None:
        server = await asyncio.start_server(
            self._serve,
            sock=listener,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_S,
        )
        try:
            await asyncio.Event().wait()
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        loop = asyncio.get_running_loop()
        state = LifespanState()
        words = (self._app, loop, self._settings, self._context, state, reader, writer)
        try:
            await _Connection(*words, stall_s=self._stall_s)
        except OSError as error:  # of closing towards a client that the network has lost
            logger.debug("a connection ended with %s", error)


class _Connection(TCPServer):
    """Writes without waiting while the client keeps up."""

    def __init__(self, app: ASGIApp, *args: Any, stall_s: float) -> None:
        respond: Any = self._respond
        super().__init__(respond, *args)
        self._app = app
        self._stall_s = stall_s
        self._num_written = 0
        self._is_left = False

    async def _respond(self, scope: Any, receive: Any, send: Any, *_: Any) -> None:
        """The application as Hypercorn calls it."""
        if scope.get("http_version") == "2":
            send = _limited(send, self._stall_s)
        elif scope["type"] == "http":
            send = _ChunkedSend(scope, send, self._write)
        await self._app(scope, receive, send)

    async def _read_data(self) -> None:
        """Once the client has gone, nothing is idle: Hypercorn would keep the connection for as
        long as an idle one may live, and a file with it.
        """
        http_1 = self.protocol.protocol
        if isinstance(http_1, H11Protocol):
            most = self.config.h11_max_incomplete_size
            http_1.connection = PatientConnection(h11.SERVER, max_incomplete_event_size=most)
        await super()._read_data()
        self._is_left = True
        await self.idle_task.stop()

    async def protocol_send(self, event: Event) -> None:
        if isinstance(event, Updated) and self._is_left:
            return  # what was asked before it went has been answered: that is no idle client
        if isinstance(event, RawData):
            await self._write(event.data)
        else:
            await super().protocol_send(event)

    async def _write(self, data: bytes) -> None:
        try:
            self.writer.write(data)
            self._num_written += len(data)
            if self.writer.transport.get_write_buffer_size() > BEHIND_BYTES:
                await self._catch_up()
        except (ConnectionError, RuntimeError):
            await self.protocol.handle(Closed())

    async def _catch_up(self) -> None:
        """Wait until the client has taken most of it. Raises ConnectionError if it is gone, or has
        taken nothing for `stall_s`.
        """
        now = asyncio.get_running_loop().time
        taken, since = self._num_taken, now()
        while True:
            try:
                async with asyncio.timeout(self._stall_s / CHECKS_PER_STALL):
                    await self.writer.drain()
                return
            except TimeoutError as error:
                if error.errno is not None:  # the kernel's: it is lost, and drain() waits no more
                    raise ConnectionAbortedError from error
            if self._num_taken > taken:
                taken, since = self._num_taken, now()
            elif now() - since >= self._stall_s:
                logger.debug("a client is cut: it took nothing for %g s", self._stall_s)
                self.writer.transport.abort()
                raise ConnectionAbortedError

    @property
    def _num_taken(self) -> int:
        """Bytes that the socket has accepted."""
        return self._num_written - self.writer.transport.get_write_buffer_size()


class _ChunkedSend:
    """Sends an answer. The parts of a stream over HTTP/1.1 go to the socket at once: five layers of
    Hypercorn and h11 would only put the same chunk's frame around each, and know no other state
    after it than before.
    """

    def __init__(self, scope: Scope, send: Send, write: Callable[[bytes], Awaitable[None]]) -> None:
        self._send, self._write = send, write
        self._may_be_chunked = scope["http_version"] == "1.1" and scope["method"] != "HEAD"
        self._is_chunked = False

    async def __call__(self, message: Message) -> None:
        if self._is_chunked and message["type"] == "http.response.body":
            if message.get("more_body") and (body := message["body"]):
                await self._write(b"%x\r\n%b\r\n" % (len(body), body))
                return
            self._is_chunked = False
        await self._send(message)
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message["headers"]}
            has_body = message["status"] == 200
            self._is_chunked = self._may_be_chunked and has_body and not names & _FRAMED


def _limited(send: Send, stall_s: float) -> Send:
    """`send` over HTTP/2, where a client can also stall one stream alone, by flow control: then a
    single write takes too long.
    """

    async def limited(message: Message) -> None:
        try:
            async with asyncio.timeout(stall_s):
                await send(message)
        except TimeoutError:
            raise ClientGone(f"did not read for {stall_s:g} s") from None

    return limited


def _settings(limits: ServerConfig) -> HypercornConfig:
    """Limits for many long streams; what Hypercorn itself says is shown from warnings on."""
    log = logger.getChild("http")
    log.setLevel(logging.WARNING)
    settings = HypercornConfig()
    # The application refuses larger heads, and says why; what it is never shown is larger still.
    settings.h11_max_incomplete_size = 2 * limits.max_header_bytes
    settings.h2_max_header_list_size = 2 * limits.max_header_bytes
    settings.errorlog = log
    settings.keep_alive_timeout = KEEP_ALIVE_S
    settings.keep_alive_max_requests = 1 << 30
    settings.h2_max_concurrent_streams = 1000
    settings.include_server_header = False
    return settings
