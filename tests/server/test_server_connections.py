"""Clients that read slowly or not at all, and what they may send as a target, on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import struct
from typing import Any

import pytest
from running_server import running
from server_fakes import FakeClient

from tokenspeed.server import http_server
from tokenspeed.server.http_server import HttpServer
from tokenspeed.server.listener import listen
from tokenspeed.server_config import ServerConfig


async def test_a_client_that_reads_nothing_does_not_hold_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its socket's buffers are full, so that its connection cannot be closed in order."""
    monkeypatch.setattr(http_server, "CLOSE_S", 0.3)
    written = 0

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        nonlocal written
        assert scope["type"] == "http"  # Hypercorn goes on without lifespan events
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while True:
            await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
            written += 1

    listener = listen("127.0.0.1", 0, 60.0)
    address = listener.getsockname()
    server = HttpServer(flood, listener, ServerConfig())
    with socket.create_connection(address) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(10):
            before = -1
            while written == 0 or written != before:
                before = written
                await asyncio.sleep(0.2)
        async with asyncio.timeout(5):
            await server.stop()


@pytest.mark.parametrize("asks", [0, 1, 2])
@pytest.mark.parametrize("how", ["close", "half-close", "reset"])
async def test_clients_that_have_gone_hold_no_connection(asks: int, how: str) -> None:
    """However long an idle one may live: clients that come for one request each would use up the
    files of the process.
    """

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    listener = listen("127.0.0.1", 0, 60.0)
    server = HttpServer(answer, listener, ServerConfig())
    for _ in range(5):
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        for _ in range(asks):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        assert asks == 0 or len(server._connections) > 0
        if how == "reset":
            raw = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.write_eof() if how == "half-close" else writer.close()
        if how == "half-close":
            assert await asyncio.wait_for(reader.read(), 5) == b"", "the server closes too"
            writer.close()
    async with asyncio.timeout(5):
        while server._connections:
            await asyncio.sleep(0.01)
    await server.stop()


@pytest.mark.parametrize("how", ["close", "half-close"])
async def test_clients_that_go_before_their_answer_comes_hold_no_connection(how: str) -> None:
    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await asyncio.sleep(0.1)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    listener = listen("127.0.0.1", 0, 60.0)
    server = HttpServer(answer, listener, ServerConfig())
    for _ in range(5):
        with socket.create_connection(listener.getsockname()) as client:
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            client.shutdown(socket.SHUT_WR)
            await asyncio.sleep(0.2 if how == "half-close" else 0.02)
    async with asyncio.timeout(5):
        while server._connections:
            await asyncio.sleep(0.01)
    await server.stop()


async def test_a_client_that_the_network_has_lost_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Closing towards it ends with ETIMEDOUT, which Hypercorn does not expect."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def lost(_: asyncio.StreamWriter) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    faults: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    listener = listen("127.0.0.1", 0, 60.0)
    server = HttpServer(answer, listener, ServerConfig())
    with monkeypatch.context() as patch:
        patch.setattr(asyncio.StreamWriter, "wait_closed", lost)
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 204")
        assert server._connections
        writer.close()
        async with asyncio.timeout(5):
            while server._connections:
                await asyncio.sleep(0.01)
    assert faults == []
    await server.stop()


async def test_a_client_that_the_kernel_cuts_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for it then fails at once, again and again: nothing else would run meanwhile."""
    ended = asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": bytes(64 << 20), "more_body": True})
        ended.set()

    num_waits = 0

    async def lost(_: asyncio.StreamWriter) -> None:
        nonlocal num_waits
        num_waits += 1
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    listener = listen("127.0.0.1", 0, 60.0)
    server = HttpServer(answer, listener, ServerConfig(write_timeout=2.0))
    monkeypatch.setattr(asyncio.StreamWriter, "drain", lost)
    with socket.create_connection(listener.getsockname()) as silent:
        silent.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(1):
            await ended.wait()
    assert num_waits < 10
    await server.stop()


TARGETS = [
    (b"GET /ping", 200),
    (b"GET http://other.example/ping", 200),
    (b"GET HTTPS://other.example:8000/ping?x=http://y", 200),
    (b"GET http://user@[::1]:80/%70ing", 200),
    (b"GET http://other.example/v1/models", 200),
    (b"GET http://other.example/v1/models", 401),
    (b"GET http://other.example/v1/models?/health", 401),
    (b"GET http://other.example/ready?level=all", 400),
    (b"GET http://other.example", 200),  # the page
    (b"GET http://other.example?x", 200),
    (b"POST http://other.example/ping", 405),
    (b"GET http://other.example/nothing", 404),
    (b"GET http:///ping", 404),  # no host
    (b"GET http:/ping", 404),
    (b"GET http://other.example%2Fping", 200),  # the page of a strange host
    (b"GET ftp://other.example/ping", 404),
    (b"GET //other.example/ping", 404),
    (b"OPTIONS *", 404),
]


async def test_a_target_may_be_a_whole_url() -> None:
    """As a proxy's clients send it; what asks for a key asks for it however it is named."""
    async with running(FakeClient(), api_key=("k",)) as server:
        await server.until("ready")
        for target, status in TARGETS:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            key = b"" if status == 401 else b"x-api-key: k\r\n"
            writer.write(target + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n" + key + b"\r\n")
            head = await reader.readuntil(b"\r\n")
            assert head.split()[1] == str(status).encode(), target
            writer.close()


POST = b"""POST /v1/completions HTTP/1.1\r
host: x\r
content-type: application/json\r
content-length: 14\r
connection: %b\r
\r
{"prompt":"x"}"""
CUTS = {"with the body": 0.0, "later": 0.02}


@pytest.mark.parametrize("pause_s", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("ending", [b"\r\n", b"\n", b"\r\n" * 9, b"\n" * (1 << 16)], ids=len)
async def test_empty_lines_after_a_body_are_nothing(ending: bytes, pause_s: float) -> None:
    """Neither to the request before nor to the one after, whatever becomes of the connection."""
    async with running(FakeClient()) as server:
        await server.until("ready")
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for connection in (b"keep-alive", b"keep-alive", b"close"):
            request = POST % connection
            parts = [request, ending] if pause_s else [request + ending]
            for part in parts:
                writer.write(part)
                await asyncio.sleep(pause_s)
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 "), connection
            length = next(line for line in head.splitlines() if b"content-length" in line)
            assert b"text_completion" in await reader.readexactly(int(length.split()[1]))
        assert await asyncio.wait_for(reader.read(), 5) == b""
        writer.close()


@pytest.mark.parametrize("ending", [b"x", b" \r\n", b"\r\nx\r\n\r\n", b"\0\r\n"], ids=str)
async def test_what_else_follows_the_last_request_is_refused(ending: bytes) -> None:
    async with running(FakeClient()) as server:
        await server.until("ready")
        for request in (POST % b"close" + ending, b"\r\n" + ending.strip(b"\r\n") + b"\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(request)
            assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
            writer.close()


@pytest.mark.parametrize("reads", [False, True])
async def test_only_a_client_whose_socket_takes_nothing_is_cut(reads: bool) -> None:
    """A slow one needs far longer than the limit for what is to be written, and is served."""
    ended = asyncio.Event()

    async def flood(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(2):
            await send({"type": "http.response.body", "body": bytes(12 << 20), "more_body": True})
        if not reads:
            assert (await receive())["type"] == "http.disconnect"
        ended.set()

    listener = listen("127.0.0.1", 0, 60.0)
    server = HttpServer(flood, listener, ServerConfig(write_timeout=1.0))
    with socket.create_connection(listener.getsockname()) as client:
        client.setblocking(False)
        client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        size = 0
        async with asyncio.timeout(20):
            while not ended.is_set():
                await asyncio.sleep(0.05)
                if reads:
                    with contextlib.suppress(BlockingIOError):
                        size += len(client.recv(1 << 20))
        assert not reads or size > 1 << 20
        await server.stop()
