"""The server on a real port, over Hypercorn: start, disconnects, signals, drain, death."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from running_server import Running, running
from server_fakes import CHAT, FakeClient, make_state

from tokenspeed.config import make_config
from tokenspeed.engine.attached import EngineRefused
from tokenspeed.engine.messages import Loading
from tokenspeed.options import ConfigError
from tokenspeed.server import http_server
from tokenspeed.server import run as run_module
from tokenspeed.server import serve as serve_module
from tokenspeed.server.listener import listen
from tokenspeed.server.serve import serve
from tokenspeed.text.source import ModelError

BODY = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200, "ignore_eos": True}


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(server: Running) -> AsyncIterator[Streams]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def streaming(server: Running, max_tokens: int = 200) -> AsyncIterator[Streams]:
    """A raw connection on which a stream has begun."""
    async with connected(server) as (reader, writer):
        body = json.dumps(BODY | {"stream": True, "max_tokens": max_tokens}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await asyncio.wait_for(reader.readuntil(b"data: "), 15)
        yield reader, writer


async def test_loading_ready_and_a_clean_end(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.state, client.progress = "loading", Loading("weights", "1 of 2")
    caplog.set_level("INFO", "tokenspeed")
    async with running(client) as server:
        await server.until("loading")
        assert (await server.http.get("/health")).status_code == 200
        answer = await server.http.post(CHAT, json=BODY)
        assert answer.status_code == 503 and "weights" in answer.text
        client.state = "ready"
        await server.until("ready")
        answer = await server.http.post(CHAT, json=BODY)
        assert answer.status_code == 200 and "server" not in answer.headers
        os.kill(os.getpid(), signal.SIGTERM)  # an idle keep-alive connection does not hold it up
        assert await server.end(6) == 0
    assert caplog.records[-1].message == "stopping: no request was running"
    ready = [record.message for record in caplog.records if record.message.startswith("ready in")]
    assert len(ready) == 1 and server.url in ready[0] and "model m" in ready[0]


@pytest.mark.parametrize("is_short", [True, False])
async def test_a_context_without_room_for_a_chat_is_told(
    is_short: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client = FakeClient()
    shortest = make_state(client).require_ready()[1].shortest_chat()
    assert client.ready is not None and 10 < shortest < client.ready.max_model_len
    length = shortest if is_short else shortest + 1
    client.ready = msgspec.structs.replace(client.ready, max_model_len=length)
    async with running(client) as server:
        await server.until("ready")
        messages = [{"role": "user", "content": ""}]
        answer = await server.http.post(CHAT, json={"messages": messages, "max_tokens": 1})
        assert answer.status_code == (400 if is_short else 200)
    said = f"the chat template alone takes {shortest} tokens, and the context has {shortest}; raise"
    assert (said in caplog.text) == is_short


async def test_failures_while_loading(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: Any) -> Any:
        raise ModelError("no such folder: give another")

    client = FakeClient()
    client.state = "loading"
    async with running(client, broken) as server:
        with pytest.raises(ConfigError, match="no such folder"):
            await server.end()
    refused = FakeClient()
    refused.state, refused.failure, refused.dead = "dead", "-O2 needs CUDA", EngineRefused
    async with running(refused) as server:
        with pytest.raises(ConfigError, match="-O2 needs CUDA"):
            await server.end()
    dying = FakeClient()
    dying.state = "loading"
    async with running(dying) as server:
        await server.until("loading")
        dying.die()
        assert await server.end() == 1
    assert "killed by a test" in caplog.records[-1].message


async def test_a_signal_while_loading_ends_at_once() -> None:
    client = FakeClient()
    client.state = "loading"
    async with running(client) as server:
        await server.until("loading")
        os.kill(os.getpid(), signal.SIGINT)
        assert await server.end(6) == 0


def test_a_taken_port_is_one_line_at_once(
    tiny_model: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve_module, "EngineClient", None)  # nothing may be started
    settings = {"model": tiny_model, "skip_tokenizer_init": True}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert serve(make_config({"port": port, **settings})) == 1
        (record,) = caplog.records
        assert str(port) in record.message and "--port" in record.message
        with pytest.raises(ConfigError, match=r"'\./nowhere': no such folder"):
            serve(make_config({"port": port, "model": "./nowhere"}))
    for host in ("256.0.0.1", "a" * 64, "a..b"):
        caplog.clear()
        assert serve(make_config({"host": host, **settings})) == 1
        (record,) = caplog.records
        assert host in record.message and "--host" in record.message


def test_an_engine_that_cannot_be_started_is_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/nowhere")
    assert serve(make_config({"port": 0})) == 1
    (record,) = caplog.records
    assert record.message.startswith("the engine process could not be started: ")
    assert "/nowhere" in record.message and record.exc_info is None


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
async def test_disconnects_reach_the_engine(how: str) -> None:
    client = FakeClient()
    client.pause_s = 0.02
    async with running(client) as server:
        await server.until("ready")
        async with streaming(server) as (_, writer):
            whole = asyncio.create_task(server.http.post(CHAT, json=BODY))
            while len(client.running) < 2:
                await asyncio.sleep(0.01)
            raw = writer.get_extra_info("socket")
            if how == "reset":
                raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.write_eof() if how == "half-close" else writer.close()
            whole.cancel()
            async with asyncio.timeout(3):
                while client.running:
                    await asyncio.sleep(0.01)
            assert len(client.aborted) == 2
            client.pause_s = 0
            assert (await server.http.post(CHAT, json=BODY)).status_code == 200


async def test_drain_lets_streams_end(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.pause_s = 0.005
    caplog.set_level("INFO", "tokenspeed")
    async with running(client, drain_timeout=10.0) as server:
        await server.until("ready")
        async with streaming(server) as (reader, _writer):
            os.kill(os.getpid(), signal.SIGTERM)
            await server.until("draining")
            answer = await server.http.post(CHAT, json=BODY)
            assert answer.status_code == 503 and "retry-after" in answer.headers
            rest = await asyncio.wait_for(reader.read(), 10)
            assert b"[DONE]" in rest and b"error" not in rest
            assert await server.end() == 0
    told = [record.message for record in caplog.records if record.message.startswith("stopping")]
    assert len(told) == 1 and told[0].startswith("stopping: 1 request ended in ")
    assert told[0].endswith(" s, 0 cut short")


@pytest.mark.parametrize("second", [False, True])
async def test_streams_end_with_an_event_at_the_deadline_or_a_second_signal(second: bool) -> None:
    client = FakeClient()
    client.pause_s = 0.2
    async with running(client, drain_timeout=60.0 if second else 0.3) as server:
        await server.until("ready")
        async with streaming(server) as (reader, _writer):
            os.kill(os.getpid(), signal.SIGTERM)
            await server.until("draining")
            if second:
                os.kill(os.getpid(), signal.SIGTERM)
            rest = await asyncio.wait_for(reader.read(), 8)
            assert b'"code":"shutdown"' in rest and b"[DONE]" in rest
            assert await server.end() == 0
            assert client.aborted


async def test_a_paused_server_waits_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeClient()
    client.pause_s = 60.0
    caplog.set_level("INFO", "tokenspeed")
    async with running(client, drain_timeout=60.0, api_key=("k",)) as server:
        await server.until("ready")
        server.http.headers["authorization"] = "Bearer k"
        asking = asyncio.create_task(server.http.post(CHAT, json=BODY))
        while not client.running:
            await asyncio.sleep(0.01)
        assert (await server.http.post("/pause_generation")).status_code == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await asking).status_code == 503
        assert await server.end(6) == 0
    told = [record.message for record in caplog.records if record.message.startswith("stopping")]
    assert len(told) == 1 and ", 1 cut short (paused" in told[0]


async def test_the_end_waits_for_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """From Python 3.12.1 on, a server counts as closed only when its connections are."""

    async def wait_closed(_: Any) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(asyncio.Server, "wait_closed", wait_closed)
    monkeypatch.setattr(http_server, "CLOSE_S", 0.3)
    client = FakeClient()
    client.pause_s = 0.2
    async with running(client, drain_timeout=0.3) as server:
        await server.until("ready")  # on a connection that stays open, idle
        async with streaming(server) as (reader, _writer), connected(server):
            os.kill(os.getpid(), signal.SIGTERM)
            rest = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
            assert b'"code":"shutdown"' in rest
            assert await server.end(6) == 0


async def test_engine_death_ends_the_server_with_events() -> None:
    client = FakeClient()
    client.pause_s = 0.02
    async with running(client) as server:
        await server.until("ready")
        async with streaming(server) as (reader, _writer):
            client.die()
            rest = await asyncio.wait_for(reader.readuntil(b"[DONE]"), 5)
            assert b'"code":"engine_dead"' in rest
            assert (await server.http.get("/health")).status_code == 503
            assert await server.end() == 1


async def test_http2_by_prior_knowledge(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CLOSE_S", 0.3)
    client = FakeClient()
    async with running(client) as server:
        await server.until("ready")
        async with connected(server) as (reader, writer):
            settings_frame = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings_frame)
            frame = await asyncio.wait_for(reader.readexactly(9), 5)
            assert frame[3] == 4  # its settings come back
            os.kill(os.getpid(), signal.SIGTERM)
            assert await server.end(8) == 0


@pytest.mark.parametrize("size", [10, 1_000_000])
@pytest.mark.parametrize("path", ["/nothing", CHAT])
async def test_refusals_overtake_no_body(path: str, size: int) -> None:
    """The refusal of a body that is still being sent arrives, and the connection stays usable."""
    client = FakeClient()
    async with running(client, max_request_bytes=2048) as server:
        await server.until("ready")
        async with connected(server) as (reader, writer):
            writer.write(f"POST {path} HTTP/1.1\r\nhost: x\r\n".encode())
            writer.write(f"content-type: text/plain\r\ncontent-length: {size}\r\n\r\n".encode())
            for _ in range(10):
                await asyncio.sleep(0.01)
                writer.write(b"x" * (size // 10))
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 404" if path == "/nothing" else b"HTTP/1.1 415")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await asyncio.wait_for(reader.read(12), 5)) == b"HTTP/1.1 200"


async def test_many_streams_at_once() -> None:
    client = FakeClient()
    client.pause_s = 0.05
    async with running(client, max_num_seqs=256) as server:
        await server.until("ready")
        async with contextlib.AsyncExitStack() as stack:
            opening = (stack.enter_async_context(streaming(server, 40)) for _ in range(100))
            streams = await asyncio.gather(*opening)
            assert len(client.requests) == 100
            for reader, _ in streams:
                await asyncio.wait_for(reader.readuntil(b"[DONE]"), 30)
        assert not client.aborted


async def test_public_addresses_without_keys_are_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for options, warned in (({}, True), ({"api_key": ("k",)}, False)):
        caplog.clear()
        with listen("0.0.0.0", 0, 5.0) as listener:
            run_module._warn_if_open(make_config(options), listener)
        assert any("--api-key" in record.message for record in caplog.records) is warned


async def test_heads_above_what_is_read_end_the_connection() -> None:
    """Up to the limit the application answers, above it the HTTP library; both say 431."""
    client = FakeClient()
    async with running(client, max_header_bytes=30_000) as server:
        await server.until("ready")
        for size, status in ((20_000, 200), (40_000, 431), (80_000, 431)):
            async with connected(server) as (reader, writer):
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: " + b"x" * size)
                writer.write(b"\r\n\r\n")
                head = await asyncio.wait_for(reader.readline(), 5)
                assert int(head.split()[1]) == status
