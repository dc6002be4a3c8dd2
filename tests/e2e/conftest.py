"""A served SmolLM2, started once a session as a user starts it."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def children(pid: int) -> list[int]:
    listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listing.split()]


@pytest.fixture(scope="session")
def server(bundled: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its base URL; its shutdown is part of the test."""
    port = free_port()
    command = [sys.executable, "-m", "tokenspeed", "serve", "smollm2", "--port", str(port)]
    command += ["--max-total-tokens", "16384", "--max-num-seqs", "16"]
    log = tmp_path_factory.mktemp("server") / "log"  # a pipe that nobody reads fills up
    with log.open("wb") as stderr:
        process = subprocess.Popen(command, stderr=stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            try:
                if httpx.get(f"{url}/ready").status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        else:
            pytest.fail(f"the server did not get ready: {log.read_text()[-2000:]}")
        engine = children(process.pid)
        assert engine, "the engine must be a process of its own"
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == 0
        for pid in engine:
            assert not Path(f"/proc/{pid}").exists(), "the engine outlived the server"
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client
