"""`tokenspeed serve` in a process of its own, as a user starts it; nothing may be left of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from tiny_checkpoint import write_tiny_checkpoint

ENGINE = b"tokenspeed.engine.process"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def children(pid: int) -> list[int]:
    try:
        listing = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(child) for child in listing.split()]


def command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def wait_for(condition: Callable[[], Any], seconds: float = 30.0, what: str = "") -> Any:
    """What `condition` gives, once it is true."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.05)
    raise AssertionError(f"not after {seconds:g} s: {what or condition}")


def limited(limits: dict[int, int]) -> list[str]:
    """The beginning of a Python command that runs with these soft limits (of `resource`)."""
    code = "import os, resource, sys\n"
    for kind, soft in limits.items():
        code += f"resource.setrlimit({kind}, ({soft}, resource.getrlimit({kind})[1]))\n"
    code += "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    return [sys.executable, "-c", code]


class Served:
    """One server. Its sockets' folder lies in `folder`, and its log there in `log`."""

    def __init__(self, words: list[str], folder: Path, limits: dict[int, int]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "log"
        self._scratch = folder / "tmp"
        self._scratch.mkdir()

        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [*limited(limits), "-m", "tokenspeed", "serve", *words, "--port", str(self.port)],
                stderr=log,
                env=os.environ | {"TMPDIR": str(self._scratch)},
            )
        self._seen: set[int] = set()

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def engine_id(self) -> int:
        """The engine's process, as soon as there is one."""

        def find() -> int | None:
            found = children(self.process.pid)
            self._seen.update(found)
            return next((pid for pid in found if ENGINE in command_of(pid)), None)

        engine: int = wait_for(find, 20, f"an engine process:\n{self.log[-2000:]}")
        self._seen.update(children(engine))
        return engine

    def get(self, path: str) -> httpx.Response | None:
        """None if nobody listens."""
        try:
            return httpx.get(f"{self.url}{path}", timeout=10)
        except httpx.TransportError:
            return None

    def status(self, path: str) -> int:
        answer = self.get(path)
        return 0 if answer is None else answer.status_code

    def wait_ready(self, seconds: float = 120.0) -> None:
        def is_ready() -> bool:
            assert self.process.poll() is None, f"it ended:\n{self.log[-2000:]}"
            return self.status("/ready") == 200

        wait_for(is_ready, seconds, f"ready:\n{self.log[-2000:]}")
        assert self.engine_id

    def gauge(self, name: str) -> float:
        text = httpx.get(f"{self.url}/metrics").text
        match = re.search(rf"^tokenspeed:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert match, f"{name} is not in /metrics"
        return float(match[1])

    def num_requests(self) -> float:
        """Those that the engine runs, and those that wait for it."""
        return self.gauge("num_requests_running") + self.gauge("num_requests_waiting")

    def wait_idle(self) -> None:
        wait_for(lambda: self.num_requests() == 0, 30, "requests were left behind")

    def end(self, seconds: float = 30.0) -> int:
        """The exit code, once it has ended; no process and no file of it is there any more."""
        code = self.process.wait(timeout=seconds)
        wait_for(lambda: not [pid for pid in self._seen if Path(f"/proc/{pid}").exists()], 5)
        assert not list(self._scratch.glob("tokenspeed-*")), "its sockets' folder was left"
        return code

    def terminate(self, seconds: float = 30.0) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.end(seconds)


@contextlib.contextmanager
def served(*words: str, limits: dict[int, int] | None = None) -> Iterator[Served]:
    """A server with these words of its command line. `limits` are soft limits of its process, by
    the numbers of `resource`.
    """
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        server = Served(list(words), Path(folder), limits or {})
        try:
            yield server
        finally:
            if server.process.poll() is None:
                server.process.kill()
            server.process.wait()


def write_long_checkpoint(folder: Path, max_model_len: int) -> str:
    """The tiny model with a context as long as that: work for seconds, in small steps."""
    path = write_tiny_checkpoint(folder) / "config.json"
    config = json.loads(path.read_text()) | {"max_position_embeddings": max_model_len}
    path.write_text(json.dumps(config))
    return str(folder)
