"""A process that another one started, as it sees itself.

    stdin    one line of JSON, which says what to do; then silence, and its end is the parent's end

Ctrl-C in a terminal reaches children too: they leave it to the parent to decide what it means.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

T = TypeVar("T")


def describe_end(code: int) -> str:
    """How a process came to an end, by the exit code that its parent sees: "was killed by SIGKILL",
    "ended with exit code 1".
    """
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal, which has no name
        return f"was killed by signal {-code}"


def read_orders(kind: type[T]) -> T:
    """What the parent wants. Raises msgspec.DecodeError for anything else."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)


def end_with_parent(tidy: Callable[[], None]) -> None:
    """End this process, after `tidy`, when the parent is gone, however it went."""
    threading.Thread(target=_watch, args=(tidy,), name="end-with-parent", daemon=True).start()


def _watch(tidy: Callable[[], None]) -> None:
    while os.read(0, 4096):
        pass
    try:
        tidy()
    finally:
        os._exit(1)
