"""`bench startup`: real starts of the real server, in fresh processes, timed by their own records.

A cold start has an empty compile cache, a warm one what the cold one left. Each serves one request,
whose first token ends it; it began when the operating system started its first process.
"""

from __future__ import annotations

import http.client
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from tokenspeed.bench.child_server import (
    MAX_LINES,
    STOP_S,
    StartFailed,
    killing_after,
    server_process,
    start_limit,
    until_ready,
)
from tokenspeed.bench.records import Timed, parse, timed

REQUEST_S = 600.0
_TIMING = {"TOKENSPEED_STARTUP_TIMING": "1"}

Report = Callable[[str], None]
"""Told what is being done, in a line for people."""


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
    with server_process({**plan.settings, "cache_dir": str(cache)}, _TIMING) as (process, log):
        url = until_ready(process, log, lines, start_limit(plan.settings))
        ready = time.time()
        first_token = _ask(plan, url)
        process.send_signal(signal.SIGTERM)
        with killing_after(process, STOP_S):
            lines.extend(log)
        spans = timed(parse(lines))
        own = [span for span in spans if span.pid == process.pid]
        if not own:
            raise StartFailed("the server wrote no start-up records")
        return Start(kind, spans, own[0].start, ready, first_token, _processes(spans, process.pid))


def _ask(plan: Plan, url: str) -> float:
    """Stream a short completion; when its first event came. Raises StartFailed."""
    address = urlsplit(url)
    headers = {"content-type": "application/json"}
    if plan.api_key is not None:
        headers["authorization"] = f"Bearer {plan.api_key}"
    body = {"prompt": plan.prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    body["return_token_ids"] = True  # so that a server without tokenizer shows its first token
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
