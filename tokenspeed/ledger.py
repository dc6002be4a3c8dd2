"""The one book of what is compiled in this process: Inductor, Triton, FlashInfer, tuning, C++.

Whoever compiles reports it here, with its seconds and its cause. What is compiled before requests
run belongs to start-up; during a step of a ready engine it holds somebody up, so it is a warning
that names the batch, or (--jit-after-ready error) an error, which ends requests that cannot do
without it.

A process has one book, since Triton has one set of hooks; threads share it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

import msgspec

from tokenspeed.log import logger

Kind = Literal["inductor", "triton", "flashinfer", "tuning", "cpp"]
Phase = Literal["startup", "serving"]


class JitCount(msgspec.Struct, frozen=True):
    """How many compiles of a kind there were in a phase, and how long they took together."""

    kind: Kind
    phase: Phase
    count: int
    seconds: float


class JitAfterReady(RuntimeError):
    """A compile was about to hold up a request, and is not allowed to."""


_lock = threading.Lock()
_counts: dict[tuple[Kind, Phase], JitCount] = {}
_step: Callable[[], str] | None = None
_forbids = False
_rehearses = False
_watches_triton = False


@contextlib.contextmanager
def serving(describe: Callable[[], str], *, forbid: bool) -> Iterator[None]:
    """A step of a ready engine runs. `describe` tells its shapes; `forbid` makes `compiling` and
    `require_allowed` raise.
    """
    global _step, _forbids
    if not _rehearses:
        _step, _forbids = describe, forbid
    try:
        yield
    finally:
        _step, _forbids = None, False


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Steps run for nobody, so that later ones find everything compiled: what they compile belongs
    to start-up, and is allowed.
    """
    global _rehearses
    _rehearses = True
    try:
        yield
    finally:
        _rehearses = False


@contextlib.contextmanager
def compiling(kind: Kind, name: str, cause: str) -> Iterator[None]:
    """Something is compiled here. Raises JitAfterReady where that is forbidden."""
    require_allowed(kind, name, cause)
    began = time.monotonic()
    yield
    report(kind, name, time.monotonic() - began, cause)


def require_allowed(kind: Kind, name: str, cause: str) -> None:
    """Raise JitAfterReady if this may not be compiled now."""
    if _forbids and _step is not None:
        raise JitAfterReady(
            f"{kind} would compile {name} after readiness ({cause}; {_step()}), which "
            "--jit-after-ready error forbids; warm up with these shapes before"
        )


def report(kind: Kind, name: str, seconds: float, cause: str) -> None:
    """Enter one compile that has ended."""
    describe = _step
    phase: Phase = "startup" if describe is None else "serving"
    add([JitCount(kind, phase, 1, seconds)])
    if describe is None:
        logger.debug("%s compiled %s in %.2f s: %s", kind, name, seconds, cause)
    else:
        where = (cause, describe())
        logger.warning(
            "%s compiled %s in %.2f s after readiness: %s; %s", kind, name, seconds, *where
        )


def add(counts: Iterable[JitCount]) -> None:
    """Enter what another process compiled for this one, or more of the same."""
    with _lock:
        for new in counts:
            old = _counts.get((new.kind, new.phase), JitCount(new.kind, new.phase, 0, 0.0))
            _counts[new.kind, new.phase] = msgspec.structs.replace(
                old, count=old.count + new.count, seconds=old.seconds + new.seconds
            )


def totals() -> tuple[JitCount, ...]:
    """All counts so far, in the order of their first entry."""
    with _lock:
        return tuple(_counts.values())


def watches_triton() -> None:
    """From now on each Triton compile of this process is reported."""
    global _watches_triton
    _watches_triton = True


def triton_totals() -> tuple[int, float] | None:
    """Triton's compiles in this process and their seconds; None if nobody watches."""
    if not _watches_triton:
        return None
    found = [each for each in totals() if each.kind == "triton"]
    return sum(each.count for each in found), sum(each.seconds for each in found)
