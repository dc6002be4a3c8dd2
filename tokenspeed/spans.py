"""Start-up timing: each phase as two lines `startup_timing {json}` of the log, at start and end.

On with TOKENSPEED_STARTUP_TIMING=1; off, no clock is read. Only host time is taken: no span waits
for a device. Children overlap their parents, so durations must not be added up. An exception passes
through a span unchanged. docs/startup-timing.md lists the records' keys and the phases.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, ParamSpec, TypeVar

from tokenspeed import ledger
from tokenspeed.log import logger

P = ParamSpec("P")
R = TypeVar("R")

_NS = 1_000_000_000


@dataclass
class Span:
    """A running phase. Set `cache` where a cache took part."""

    span_id: int | None = None
    rank: int = 0
    role: str | None = None
    cache: Literal["hit", "miss", "partial"] | None = None


_ids = itertools.count(1)
_NO_SPAN = Span()
_current: contextvars.ContextVar[Span] = contextvars.ContextVar("span", default=_NO_SPAN)
_enabled = os.environ.get("TOKENSPEED_STARTUP_TIMING", "").lower() in ("1", "true", "yes", "y")


@contextlib.contextmanager
def span(phase: str, *, rank: int | None = None, role: str | None = None) -> Iterator[Span]:
    """Time one phase; a context manager, or a decorator that times each call. `rank` and `role` are
    the parent's where they are not given.
    """
    if not _enabled:
        yield Span()
        return
    parent = _current.get()
    own = Span(
        next(_ids), parent.rank if rank is None else rank, parent.role if role is None else role
    )
    token = _current.set(own)
    before = ledger.triton_totals()
    _start(phase, own, parent, time.time_ns())
    began, error = time.monotonic(), None
    try:
        yield own
    except BaseException as exception:
        error = type(exception).__name__
        raise
    finally:
        _current.reset(token)
        seconds = time.monotonic() - began
        _end(phase, own, parent, (time.time_ns(), seconds), error, before)


def process_import() -> None:
    """The span from this process's start, as the operating system knows it, until now: the
    interpreter's start and the imports. Called once logging is set up.
    """
    if not _enabled:
        return
    now = time.time_ns()
    own = Span(next(_ids))
    age = _process_age_s()
    _start("process.import", own, _NO_SPAN, now - int(age * _NS))
    _end("process.import", own, _NO_SPAN, (now, age), None, ledger.triton_totals())


def carried(function: Callable[P, R]) -> Callable[P, R]:
    """`function`, whose spans get the caller's as parent in whatever thread it runs."""
    if not _enabled:
        return function
    context = contextvars.copy_context()

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        return context.run(function, *args, **kwargs)

    return run


def _start(phase: str, own: Span, parent: Span, wall_time_ns: int) -> None:
    _record({**_common(phase, own, parent), "event": "start", "wall_time_ns": wall_time_ns})


def _end(
    phase: str,
    own: Span,
    parent: Span,
    times: tuple[int, float],
    error: str | None,
    before: tuple[int, float] | None,
) -> None:
    """`times`: the wall time in ns, the duration in s. `before`: Triton's totals at the start."""
    after = ledger.triton_totals()
    count = seconds = None
    if after is not None:
        # Triton may have been imported, and so watched, by this very phase.
        count, seconds = after[0] - (before or (0, 0.0))[0], after[1] - (before or (0, 0.0))[1]
    fields = {
        **_common(phase, own, parent),
        "event": "end",
        "wall_time_ns": times[0],
        "duration_s": times[1],
        "status": "error" if error else "ok",
        "error_type": error,
        "triton_compiles": count,
        "triton_compile_s": seconds,
    }
    _record(fields if own.cache is None else {**fields, "cache": own.cache})


def _common(phase: str, own: Span, parent: Span) -> dict[str, object]:
    return {
        "phase": phase,
        "pid": os.getpid(),
        "rank": own.rank,
        "role": own.role,
        "span_id": own.span_id,
        "parent_id": parent.span_id,
    }


def _record(fields: dict[str, object]) -> None:
    with contextlib.suppress(Exception):  # a broken log handler must not hide the phase's own error
        logger.info("startup_timing %s", json.dumps(fields, separators=(",", ":")))


def _process_age_s() -> float:
    """Seconds since this process was started, to the kernel's clock tick of 10 ms."""
    # The name, in brackets, may hold anything; the start is the 20th field after it (proc(5)).
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
