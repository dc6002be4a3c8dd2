"""How often what has ended is started again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Restarts:
    """`limit` times in any `window_s` seconds."""

    def __init__(
        self, limit: int, window_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limit = limit
        self._window_s, self._clock = window_s, clock
        self._times: deque[float] = deque()

    def allow(self) -> bool:
        """Whether there may be one now; it is counted then."""
        now = self._clock()
        while self._times and now - self._times[0] >= self._window_s:
            self._times.popleft()
        if len(self._times) >= self.limit:
            return False
        self._times.append(now)
        return True

    @property
    def count(self) -> int:
        """Of those in the window, as of the last call of `allow`."""
        return len(self._times)
