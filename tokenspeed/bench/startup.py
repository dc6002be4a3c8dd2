"""`bench startup`: real starts of the real server, in fresh processes, timed by their own records.

A cold start has an empty compile cache, a warm one what the cold one left. Each serves one request,
whose first token ends it; it began when the operating system started its first process.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

import msgspec

from tokenspeed.bench.records import Timed, parse, timed

READY = re.compile(r"ready in [\d.]+ s at (http://\S+), model ")
STOP_S = 30.0
REQUEST_S = 600.0
MAX_LINES = 100_000

Report = Callable[[str], None]
"""Told what is being done, in a line for people."""


class StartFailed(RuntimeError):
    """A start gave no token; one line: why."""


@dataclass(frozen=True)
class Start:
    """One measured start: its spans, from `began` (process start) to the first token."""

    kind: str
    spans: list[Timed]
    began: float
    ready: float
    first_token: float
    processes: Mapping[int, str]

    @property
    def wall(self) -> float:
        return self.first_token - self.began


@dataclass(frozen=True)
class Plan:
    """What to start: settings as option values, how often, and whether cold starts differ."""

    settings: Mapping[str, object]
    num_runs: int
    has_cold: bool
    prompt: str | list[int]
    api_key: str | None


def measure(plan: Plan, report: Report) -> list[Start]:
    """All starts, in order; cold ones before warm ones. Raises StartFailed."""
    starts = []
    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        for number in range(plan.num_runs if plan.has_cold else 0):
            report(f"cold start {number + 1} of {plan.num_runs}")
            starts.append(_start(plan, "cold", Path(folder, f"cache-{number}")))
        warm = Path(folder, "cache-0")
        if not plan.has_cold:
            report("a start that is not counted, to fill caches")
            _start(plan, "warm", warm)
        for number in range(plan.num_runs):
            report(f"warm start {number + 1} of {plan.num_runs}")
            starts.append(_start(plan, "warm", warm))
    return starts


def _start(plan: Plan, kind: str, cache: Path) -> Start:
    lines: deque[str] = deque(maxlen=MAX_LINES)
    with _server(plan, cache) as (process, log):
        ready = first_token = 0.0
        for line in log:
            lines.append(line)
            found = READY.search(line)
            if found and not ready:
                ready = time.time()
                first_token = _ask(plan, found[1])
                process.send_signal(signal.SIGTERM)
        if not first_token:
            raise StartFailed(_why(lines))
        spans = timed(parse(lines))
        own = [span for span in spans if span.pid == process.pid]
        if not own:
            raise StartFailed("the server wrote no start-up records")
        return Start(kind, spans, own[0].start, ready, first_token, _processes(spans, process.pid))


@contextlib.contextmanager
def _server(plan: Plan, cache: Path) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A server of its own process, and its log. It is ended, whatever happens."""
    settings = {**plan.settings, "port": 0, "cache_dir": str(cache), "log_level": "info"}
    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        # JSON is YAML; a file, so that keys do not stand on a command line.
        path = Path(folder, "settings.yaml")
        path.write_bytes(msgspec.json.encode(settings))
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", "serve", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TOKENSPEED_STARTUP_TIMING": "1"},
        )
        assert process.stderr is not None
        try:
            with process.stderr as log:
                yield process, log
        finally:
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _ask(plan: Plan, url: str) -> float:
    """Stream a short completion; when its first event came. Raises StartFailed."""
    address = urlsplit(url)
    headers = {"content-type": "application/json"}
    if plan.api_key is not None:
        headers["authorization"] = f"Bearer {plan.api_key}"
    body = {"prompt": plan.prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=REQUEST_S)
    try:
        connection.request("POST", "/v1/completions", msgspec.json.encode(body), headers)
        answer = connection.getresponse()
        first = answer.readline()
        came = time.time()
        rest = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise StartFailed(f"the first request failed: {error}") from error
    finally:
        connection.close()
    if answer.status != 200 or not first.startswith(b"data: ") or b"[DONE]" not in rest:
        told = (first + rest)[:300].decode(errors="replace")
        raise StartFailed(f"the first request was answered with {answer.status}: {told}")
    return came


def _processes(spans: Iterable[Timed], server: int) -> dict[int, str]:
    """What each process is, by its phases."""
    names: dict[int, str] = {}
    for span in spans:
        names.setdefault(span.pid, "http" if span.pid == server else "compiler")
        if span.phase == "scheduler.init" and span.pid != server:
            names[span.pid] = "engine"
    return names


def _why(lines: Iterable[str]) -> str:
    told = [line.strip() for line in lines if "startup_timing" not in line and line.strip()]
    return f"the server ended before it was ready; its last words: {' | '.join(told[-3:])}"
