"""`tokenspeed serve --api-processes 2` as a user starts it, and connections to the process that a
test wants: the kernel deals them out, so that it takes a few.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIBLING, ENGINE = b"tokenspeed.server.process", b"tokenspeed.engine.process"
WAIT_S = 60.0
KEY = {"authorization": "Bearer k"}


def until(condition: Callable[[], object], seconds: float = WAIT_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _inodes(pid: int) -> set[str]:
    """Of the sockets that a process has open."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(str(path.readlink()))
    return found


class Served:
    """A server of a model without tokenizer, which asks for the key `k`."""

    def __init__(self, model: str, *words: str, tls: ssl.SSLContext | None = None) -> None:
        self._log = tempfile.TemporaryFile("w+")
        self._tls = tls
        command = [sys.executable, "-m", "tokenspeed", "serve", model, "--port", "0"]
        command += ["--device", "cpu", "--skip-tokenizer-init", "--served-model-name", "m"]
        command += ["--max-model-len", "8192", "--max-total-tokens", "40000"]
        command += ["--api-key", "k", "--api-processes", "2", *words]
        self.process = subprocess.Popen(command, stderr=self._log)
        self.pid = self.process.pid

    def wait_ready(self) -> None:
        ready = re.compile(r"INFO ready in .* at https?://127\.0\.0\.1:(\d+), model")
        until(lambda: ready.search(self.log()) or self.process.poll() is not None)
        match = ready.search(self.log())
        assert match, "it did not get ready"
        self.port = int(match[1])
        self.find_engine()
        self.folder = self._shared_folder()
        self._others = [self.engine, self.sibling]

    def find_engine(self) -> int:
        """The engine's process, which may be another than before."""
        (self.engine,) = self._children(ENGINE)
        return self.engine

    @property
    def sibling(self) -> int:
        (pid,) = self._children(SIBLING)
        return pid

    @property
    def pids(self) -> list[int]:
        """Of the HTTP processes."""
        return [self.pid, self.sibling]

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def connect(self, pid: int) -> http.client.HTTPConnection:
        """A connection that the process `pid` has accepted."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            raw = socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S)
            if self._owner(raw) == pid:
                wrapped = self._tls.wrap_socket(raw) if self._tls else raw
                connection = http.client.HTTPConnection("127.0.0.1", self.port)
                connection.sock = wrapped
                return connection
            raw.close()
        raise AssertionError(f"process {pid} accepts no connection")

    def ask(
        self, pid: int, method: str, path: str, body: Any = None, **headers: str
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (read as JSON if it is) and headers."""
        with contextlib.closing(self.connect(pid)) as connection:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {**KEY, **headers})
            answer = connection.getresponse()
            text = answer.read().decode()
            is_json = "json" in (answer.getheader("content-type") or "")
            told = {name.lower(): value for name, value in answer.getheaders()}
            return answer.status, json.loads(text) if is_json else text, told

    def complete(self, pid: int, **fields: Any) -> dict[str, Any]:
        body = {"prompt": [5, 6, 9], "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        status, told, _ = self.ask(pid, "POST", "/v1/completions", body | fields)
        assert status == 200, told
        return told

    def stream(self, pid: int, max_tokens: int = 8000, **headers: str) -> Stream:
        return Stream(self.connect(pid), max_tokens, {**KEY, **headers})

    def figure(self, pid: int, name: str) -> float:
        """A metric's only sample, or that of the model."""
        text = self.ask(pid, "GET", "/metrics")[1]
        match = re.search(rf"^tokenspeed:{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        assert match, f"{name} is not in /metrics"
        return float(match[1])

    def signal(self, *signals: signal.Signals) -> None:
        """To the first process, one after the other."""
        self._others = [self.engine, self.sibling]
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)

    def end(self, seconds: float = WAIT_S) -> int:
        """The exit code, when it ends, and nothing may be left then."""
        code = self.process.wait(seconds)
        until(lambda: not any(map(is_alive, self._others)), 10)
        until(lambda: not self.folder.exists(), 10)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._log.close()

    def _children(self, of: bytes) -> list[int]:
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        if not listing.exists():
            return []
        found = []
        for pid in listing.read_text().split():
            with contextlib.suppress(OSError):
                if of in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(int(pid))
        return found

    def _shared_folder(self) -> Path:
        """Named by the addresses of the Unix sockets that the engine has bound."""
        for line in Path("/proc/net/unix").read_text().splitlines():
            words = line.split()
            if len(words) == 8 and f"socket:[{words[6]}]" in _inodes(self.engine):
                return Path(words[7]).parent
        raise AssertionError("the engine listens nowhere")

    def _owner(self, raw: socket.socket) -> int | None:
        """The process that has accepted a connection, once one has."""
        deadline = time.monotonic() + 2.0
        local = f"{raw.getsockname()[1]:04X}"
        while time.monotonic() < deadline:
            for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
                words = line.split()
                if words[2].endswith(f":{local}") and words[1].endswith(f":{self.port:04X}"):
                    for pid in (self.process.pid, *self._children(SIBLING)):
                        with contextlib.suppress(OSError):
                            if f"socket:[{words[9]}]" in _inodes(pid):
                                return pid
            time.sleep(0.005)
        return None


class Stream:
    """A stream that has begun."""

    def __init__(
        self, connection: http.client.HTTPConnection, max_tokens: int, headers: dict[str, str]
    ) -> None:
        self.connection = connection
        body = {"prompt": [5, 6], "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
        body["return_token_ids"] = True  # or nothing is shown without a tokenizer
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._answer = connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        first = self._answer.readline()
        self.id: str = json.loads(first.removeprefix(b"data: "))["id"]

    def rest(self) -> str:
        with contextlib.closing(self.connection):
            return self._answer.read().decode()

    def leave(self) -> None:
        self._answer.close()
        self.connection.close()


@contextlib.contextmanager
def serving(model: str, *words: str, tls: ssl.SSLContext | None = None) -> Iterator[Served]:
    served = Served(model, *words, tls=tls)
    try:
        served.wait_ready()
        yield served
    except BaseException:
        print(served.log())
        raise
    finally:
        served.close()
