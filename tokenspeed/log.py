"""The logger, and spans: start-up phases as one `startup_timing {json}` line at start and end of
each.

Spans are on with TOKENSPEED_STARTUP_TIMING=1; off, they read no clock. Children overlap parents, so
durations must not be added up. An exception passes through a span unchanged.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import json
import logging
import os
import sys
import time
from collections.abc import Iterator

logger = logging.getLogger("tokenspeed")

_ids = itertools.count(1)
_parent: contextvars.ContextVar[int | None] = contextvars.ContextVar("span", default=None)
_enabled = os.environ.get("TOKENSPEED_STARTUP_TIMING", "").lower() in ("1", "true", "yes", "y")


def setup_logging(level: str = "info") -> None:
    """Log to stderr, a line a record. Called once a process, by its entry point."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )


@contextlib.contextmanager
def span(phase: str, *, rank: int = 0, role: str | None = None) -> Iterator[None]:
    """Time one start-up phase: two records on the log, if start-up timing is on."""
    if not _enabled:
        yield
        return
    span_id, parent_id = next(_ids), _parent.get()
    token = _parent.set(span_id)
    common = {"phase": phase, "pid": os.getpid(), "rank": rank, "role": role}
    common |= {"span_id": span_id, "parent_id": parent_id}
    _record({**common, "event": "start", "wall_time_ns": time.time_ns()})
    began, error = time.monotonic(), None
    try:
        yield
    except BaseException as exception:
        error = type(exception).__name__
        raise
    finally:
        _parent.reset(token)
        end = {
            "event": "end",
            "wall_time_ns": time.time_ns(),
            "duration_s": time.monotonic() - began,
        }
        end |= {"status": "error" if error else "ok", "error_type": error}
        # Null, not 0: nothing counts Triton compiles before the JIT ledger exists.
        _record({**common, **end, "triton_compiles": None, "triton_compile_s": None})


def _record(fields: dict[str, object]) -> None:
    with contextlib.suppress(Exception):  # a broken log handler must not hide the phase's own error
        logger.info("startup_timing %s", json.dumps(fields, separators=(",", ":")))
