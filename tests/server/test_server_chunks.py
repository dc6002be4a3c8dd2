"""Parts of a stream over HTTP/1.1 take a shorter way to the socket than other answers: they come as
h11 would have framed them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import h11
import pytest

from tokenspeed.server.http_server import HttpServer
from tokenspeed.server.listener import listen
from tokenspeed.server_config import ServerConfig

PARTS = [b"data: 1\n\n", b"", b"0\r\n\r\n", bytes(range(256)) * 300, b"", b"end"]
LENGTH = str(sum(map(len, PARTS))).encode()
HEADS: dict[str, tuple[int, list[tuple[bytes, bytes]]]] = {
    "stream": (200, [(b"content-type", b"text/event-stream")]),
    "whole": (200, [(b"Content-Length", LENGTH)]),
    "created": (201, []),
    "nothing": (204, []),
}
"""Path -> status and headers of its answer."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await receive()
    status, headers = HEADS[scope["path"][1:]]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    for part in PARTS if status != 204 else ():
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.fixture
async def address() -> AsyncIterator[tuple[str, int]]:
    listener = listen("127.0.0.1", 0, 60.0)
    found: tuple[str, int] = listener.getsockname()
    server = HttpServer(answer, listener, ServerConfig())
    yield found
    await server.stop()


async def ask(address: tuple[str, int], *requests: bytes) -> bytes:
    """All that comes of requests on one connection, until it ends."""
    reader, writer = await asyncio.open_connection(*address)
    writer.write(b"".join(requests))
    data = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    return data


def request(path: str, method: str = "GET", version: str = "1.1", *, last: bool = True) -> bytes:
    end = "connection: close\r\n" if last else ""
    return f"{method} /{path} HTTP/{version}\r\nhost: x\r\n{end}\r\n".encode()


def read(data: bytes, method: str = "GET") -> tuple[h11.Response, bytes]:
    """One answer, as h11 reads it, strictly."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    response, body = client.next_event(), b""
    assert isinstance(response, h11.Response)
    client.receive_data(b"")
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert isinstance(event, h11.Data)
        body += event.data
    return response, body


@pytest.mark.parametrize("method", ["GET", "POST", "HEAD"])
@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("path", HEADS)
async def test_every_answer_is_framed(
    address: tuple[str, int], method: str, version: str, path: str
) -> None:
    response, body = read(await ask(address, request(path, method, version)), method)
    status, _ = HEADS[path]
    assert response.status_code == status
    is_empty = method == "HEAD" or status == 204
    assert body == (b"" if is_empty else b"".join(PARTS))
    if method != "HEAD":
        is_chunked = (b"transfer-encoding", b"chunked") in response.headers
        assert is_chunked == (version == "1.1" and path in ("stream", "created"))


async def test_each_part_is_a_chunk(address: tuple[str, int]) -> None:
    data = await ask(address, request("stream"))
    _, _, body = data.partition(b"\r\n\r\n")
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in PARTS if part]
    assert body == b"".join([*chunks, b"0\r\n\r\n"])


async def test_a_connection_goes_on_behind_a_stream(address: tuple[str, int]) -> None:
    asked = [request(path, last=path == "nothing") for path in ("stream", "stream", "nothing")]
    data = await ask(address, *asked)
    once = await ask(address, request("stream"))
    _, _, body = once.partition(b"\r\n\r\n")
    assert data.count(body) == 2 and data.count(b"HTTP/1.1 200") == 2
    assert data.count(b"HTTP/1.1 204") == 1
