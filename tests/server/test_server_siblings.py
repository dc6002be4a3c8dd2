"""How the ends of siblings end the server, and those that hang or do not end; no engine is run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import values
from running_server import Running, running
from server_fakes import FakeClient
from test_server_coordinator import until

from tokenspeed.server import run as run_module
from tokenspeed.server import siblings as siblings_module

SIBLING = """#!{python}
import sys, msgspec, zmq
orders = msgspec.json.decode(sys.stdin.readline())
context = zmq.Context()
socket = context.socket(zmq.DEALER)
socket.set(zmq.IDENTITY, str(orders["number"]).encode())
socket.set(zmq.LINGER, 1000)
socket.connect(f"ipc://{{orders['folder']}}/coordinator")
{does}
"""
SERVES = 'socket.send(msgspec.msgpack.encode({"type": "serving"}))'
LATER_ONES_FAIL = f"""
{SERVES}
if orders["number"] == 1:
    socket.recv()
socket.close()
context.term()
sys.exit(3)
"""
HANGS_ONCE = f"""
{SERVES}
while orders["number"] > 1:
    if b"ping" in socket.recv():
        socket.send(msgspec.msgpack.encode({{"type": "pong"}}))
while True:
    socket.recv()
"""
STAYS = f"{SERVES}\nwhile True:\n    socket.recv()"


@contextlib.asynccontextmanager
async def started(
    folder: Path, monkeypatch: pytest.MonkeyPatch, does: str
) -> AsyncIterator[tuple[Running, FakeClient]]:
    """A server whose sibling does as the script says."""
    python = folder / "python"
    python.write_text(SIBLING.format(python=sys.executable, does=does))
    python.chmod(0o700)
    monkeypatch.setattr(siblings_module.sys, "executable", str(python))
    monkeypatch.setattr(siblings_module, "share_metrics", lambda folder: None)
    monkeypatch.setattr(siblings_module, "STOP_S", 0.2)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(folder))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue(lambda: 0))
    client: Any = FakeClient()
    client.folder, client.address = folder, f"ipc://{folder}/engine"
    async with running(client, api_processes=2) as server:
        yield server, client
    assert not (folder / "http").exists()


async def test_a_sibling_that_cannot_start_ends_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with started(tmp_path, monkeypatch, "sys.exit(3)") as (server, _):
        assert (await server.http.get("/ready")).json()["status"] == "loading"
        assert await server.end() == 1
    told = [record.message for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["HTTP process 1 of the server ended with exit code 3 while it started"]


async def test_siblings_that_end_again_and_again_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each time the engine is asked to look who is still there, and streams end with an event."""
    monkeypatch.setattr(siblings_module, "RESTARTS", 2)
    async with started(tmp_path, monkeypatch, LATER_ONES_FAIL) as (server, client):
        client.gate.clear()
        await server.until("ready")
        stream = asyncio.create_task(
            server.http.post("/v1/completions", json={"prompt": "x", "stream": True})
        )
        assert await server.end(20) == 1
        assert '"code":"shutdown"' in (await stream).text
    assert client.commands.asked == ["tell", "tell"]
    told = [record.message for record in caplog.records if record.name == "tokenspeed"]
    again = "HTTP process 1 of the server ended with exit code 3: its requests are aborted, and it "
    assert [line for line in told if line.startswith("HTTP process")] == [
        *[f"{again}is started again"] * 2,
        "HTTP process 1 of the server ended with exit code 3: more than 2 such ends in 60 s",
    ]


async def test_a_sibling_that_hangs_is_killed_and_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It answers no ping; the next one does, and is left alone."""
    monkeypatch.setattr(siblings_module, "PING_S", 0.1)
    async with started(tmp_path, monkeypatch, HANGS_ONCE) as (server, _):
        await server.until("ready")
        await until(lambda: "is started again" in caplog.text)
        await asyncio.sleep(1.5)  # more pings than the first was sent
    told = [record.message for record in caplog.records if record.name == "tokenspeed"]
    assert [line for line in told if line.startswith("HTTP process")] == [
        "HTTP process 1 of the server has not answered for 1 s, and is killed",
        "HTTP process 1 of the server was killed by SIGKILL: its requests are aborted, and it is "
        "started again",
    ]


async def test_a_sibling_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, monkeypatch, STAYS) as (server, client):
        for name in ("DEATH_GRACE_S", "LAST_EVENTS_S", "CLOSE_S"):
            monkeypatch.setattr(run_module, name, 0.1)
        await server.until("ready")
        client.die()
        assert await server.end(15) == 1


async def test_a_sibling_that_still_starts_holds_up_no_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with started(tmp_path, monkeypatch, "socket.recv()") as (server, _):
        await server.until("loading")
        os.kill(os.getpid(), signal.SIGTERM)
        assert await server.end(3) == 0
