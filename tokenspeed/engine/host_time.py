"""What the engine's thread does itself for its steps, apart from waiting for the device.

    schedule, launch, sample | wait | results, commit, post
    launch_s                        | commit_s

Where the host computes the step itself, on a CPU, that is part of the first. With overlap all of it
is hidden as long as it takes less than the device does.
"""

from __future__ import annotations

import time


class HostTime:
    """Seconds since the start. A stretch begins with `begin` and ends with one of the others."""

    __slots__ = ("_began", "commit_s", "launch_s")

    def __init__(self) -> None:
        self.launch_s = self.commit_s = 0.0
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.perf_counter()

    def launched(self) -> None:
        self.launch_s += time.perf_counter() - self._began

    def committed(self) -> None:
        self.commit_s += time.perf_counter() - self._began
