"""How long each phase of an engine's start-up took, as the HTTP process sees it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class Phase(msgspec.Struct, frozen=True):
    name: str
    seconds: float


class StartupPhases:
    """One phase follows the other; one that comes again goes on where it was."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self._running: tuple[str, float] | None = None

    def enter(self, name: str) -> None:
        """The phase before, if any, is over."""
        if self._running is not None and self._running[0] == name:
            return
        self.end()
        self._seconds.setdefault(name, 0.0)
        self._running = (name, self._clock())

    def end(self) -> None:
        """The start-up is over, one way or the other."""
        if self._running is not None:
            name, began = self._running
            self._seconds[name] += self._clock() - began
            self._running = None

    def adopt(self, phases: list[Phase]) -> None:
        """A start-up that another process has seen from its beginning, and that is over."""
        self._seconds, self._running = {each.name: each.seconds for each in phases}, None

    @property
    def phases(self) -> list[Phase]:
        """All so far, in order of their first time; the running one up to now."""
        found = dict(self._seconds)
        if self._running is not None:
            name, began = self._running
            found[name] += self._clock() - began
        return [Phase(name, seconds) for name, seconds in found.items()]
