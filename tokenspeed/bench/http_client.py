"""HTTP/1.1 for a load generator: h11 over asyncio, connections kept alive, bytes as they come.

Nothing stands between the socket and the clock: a block is handed on as soon as it is read. There
is no limit of its own on open connections and no timeout: both are the caller's.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import h11

from tokenspeed import __version__

MAX_BODY_BYTES = 16 << 20
"""Of an answer that is read whole."""
_READ_BYTES = 1 << 16


class BadURL(ValueError):
    """An address that is no http or https address; one line."""


@dataclass(frozen=True)
class Address:
    """Where a server is: `path` stands before the path of every request."""

    host: str
    port: int
    is_tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Raises BadURL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise BadURL(f"{url[:200]!r} is no URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BadURL(f"{url[:200]!r} must be like http://127.0.0.1:8000")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise BadURL("a base URL has neither user, password, query nor fragment")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))

    @property
    def url(self) -> str:
        """As people write it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.is_tls}://{host}:{self.port}{self.path}"


@dataclass(eq=False)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    protocol: h11.Connection = field(default_factory=lambda: h11.Connection(h11.CLIENT))

    async def event(self) -> h11.Event | None:
        """The next one; None if nothing more can come."""
        while True:
            event = self.protocol.next_event()
            if isinstance(event, h11.Event):
                return event
            if event is not h11.NEED_DATA:
                return None
            self.protocol.receive_data(await self.reader.read(_READ_BYTES))

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True)
class Response:
    """An answer whose head has come. `blocks` may be read once."""

    status: int
    blocks: AsyncIterator[bytes]

    async def read(self, limit: int = MAX_BODY_BYTES) -> bytes:
        """The body; what is beyond `limit` is not waited for."""
        body = bytearray()
        async for block in self.blocks:
            body += block[: limit - len(body)]
            if len(body) == limit:
                break
        return bytes(body)


class HttpClient:
    """Requests to one server; `headers` go with each. Lives on one event loop."""

    def __init__(self, address: Address, headers: Mapping[str, str]) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        self._headers = {
            "host": f"{host}:{address.port}",
            "user-agent": f"tokenspeed-bench/{__version__}",
            "accept": "*/*",
            **headers,
        }
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: list[_Connection] = []

    @contextlib.asynccontextmanager
    async def request(
        self, method: str, path: str, body: bytes | None = None
    ) -> AsyncGenerator[Response, None]:
        """`async with client.request(...) as response`. Raises OSError, h11.RemoteProtocolError,
        also while the body is read. The connection is used again if the body was read to its end.
        """
        data = self._encode(method, path, body)
        connection, head = await self._exchange(data)
        try:
            yield Response(head.status_code, _blocks(connection))
        except BaseException:
            connection.close()
            raise
        if connection.protocol.states == {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            connection.protocol.start_next_cycle()
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def _encode(self, method: str, path: str, body: bytes | None) -> list[h11.Event]:
        headers = dict(self._headers)
        if body is not None:
            headers |= {"content-type": "application/json", "content-length": str(len(body))}
        events: list[h11.Event] = [
            h11.Request(
                method=method, target=self._address.path + path, headers=list(headers.items())
            )
        ]
        if body is not None:
            events.append(h11.Data(data=body))
        return [*events, h11.EndOfMessage()]

    async def _exchange(self, events: list[h11.Event]) -> tuple[_Connection, h11.Response]:
        """Send a request; the connection, and the head of its answer. A kept connection that the
        server has closed meanwhile is replaced, which is no failure of the request.
        """
        while self._idle:
            connection = self._idle.pop()
            try:
                return connection, await _ask(connection, events)
            except (OSError, h11.RemoteProtocolError):
                connection.close()
            except BaseException:
                connection.close()
                raise
        address = self._address
        connection = _Connection(
            *await asyncio.open_connection(address.host, address.port, ssl=self._tls)
        )
        try:
            return connection, await _ask(connection, events)
        except BaseException:
            connection.close()
            raise


async def _ask(connection: _Connection, events: list[h11.Event]) -> h11.Response:
    data = b"".join(connection.protocol.send(event) or b"" for event in events)
    connection.writer.write(data)
    await connection.writer.drain()
    while True:
        event = await connection.event()
        if isinstance(event, h11.Response):
            return event
        if not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("the server closed the connection without an answer")


async def _blocks(connection: _Connection) -> AsyncIterator[bytes]:
    while isinstance(event := await connection.event(), h11.Data):
        yield bytes(event.data)
    if not isinstance(event, h11.EndOfMessage):
        raise h11.RemoteProtocolError("the answer has no end")
