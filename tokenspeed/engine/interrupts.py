"""Ctrl-C between steps: a step that has begun is ended first.

Python raises KeyboardInterrupt behind any instruction, so also where a scheduler has planned a step
and nobody has launched it yet. Held back, it is raised where whoever holds it asks for it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class HeldInterrupts:
    """The interrupts that came and were not delivered yet."""

    def __init__(self) -> None:
        self.is_forced = False
        """A second one came while the first still waited: something hangs, so it did not."""
        self._former = signal.getsignal(signal.SIGINT)
        self._is_waiting = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signal."""
        self.is_forced = self._is_waiting
        self._is_waiting = True
        if self.is_forced:
            self.deliver()

    def deliver(self) -> None:
        """If one waits, do what it would have done: raise KeyboardInterrupt, mostly."""
        if self._is_waiting and callable(self._former):
            self._is_waiting = False
            self._former(signal.SIGINT, None)


@contextmanager
def hold_interrupts() -> Iterator[HeldInterrupts]:
    """Hold Ctrl-C back until it is delivered or all is over. Signals are the main thread's; in
    others, and where Ctrl-C does not run Python, nothing has to be held.
    """
    held = HeldInterrupts()
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield held
        return
    signal.signal(signal.SIGINT, held)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, former)
    held.deliver()
