"""Notices other programs on the cores that an engine computes on, and says what helps.

On a CPU all threads of a step wait for each other at every operation. A thread that has lost its
core to another program for a few milliseconds holds all of them up, hundreds of times a token, and
the engine is slower by far more than the share that the other program takes.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tokenspeed.log import logger

INTERVAL_S = 10.0
IN_A_ROW = 2
"""Intervals in which others are in the way, before it is said: what is short passes by itself."""
_AT_WORK = 0.3
"""Of a core, that the engine uses when it has work; else nobody is in anybody's way."""
_IN_THE_WAY = 0.25
"""Of a core, that is missing for the engine's threads."""


@dataclass(frozen=True)
class CoreTimes:
    """Seconds on the clock, seconds of all processes on our cores, and those of this one and of its
    parent among them, each since some beginning.
    """

    clock: float
    all: float
    ours: float

    @classmethod
    def read(cls, cores: frozenset[int], proc: Path = Path("/proc")) -> CoreTimes:
        """Raises OSError or ValueError where there is no such file, or not of this form."""
        tick = os.sysconf("SC_CLK_TCK")
        lines = (proc / "stat").read_text().splitlines()
        rows = (line.split() for line in lines if line.startswith("cpu"))
        # user, nice, system, idle, iowait, irq, softirq, steal
        busy = sum(
            sum(map(int, row[1:4])) + sum(map(int, row[6:9]))
            for row in rows
            if row[0] in {f"cpu{core}" for core in cores}
        )
        parent = (proc / str(os.getppid()) / "stat").read_text().rpartition(")")[2].split()
        theirs = int(parent[11]) + int(parent[12])
        return cls(time.monotonic(), busy / tick, time.process_time() + theirs / tick)


def missing_cores(before: CoreTimes, after: CoreTimes, threads: int, cores: int) -> float:
    """How many of the cores that the engine's threads want others use; 0 while it rests."""
    seconds = after.clock - before.clock
    ours, all_ = (after.ours - before.ours) / seconds, (after.all - before.all) / seconds
    if ours < _AT_WORK:
        return 0.0
    return max(0.0, min(all_ - ours, cores) + threads - cores)


def watch_cores(device: str) -> None:
    """From now on, in a thread of its own, unless a GPU does the work. `device`: as it was asked
    for.
    """
    is_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    cores, threads = frozenset(os.sched_getaffinity(0)), torch.get_num_threads()
    if is_cpu and threads > 1:  # one thread waits for nobody
        words = (threads, len(cores), lambda: CoreTimes.read(cores))
        threading.Thread(target=_watch, args=words, name="core-watch", daemon=True).start()


def _watch(
    threads: int,
    cores: int,
    read: Callable[[], CoreTimes],
    sleep: Callable[[float], object] = time.sleep,
) -> None:
    """Until it has been said once."""
    count = 0
    try:
        before = read()
        while count < IN_A_ROW:
            sleep(INTERVAL_S)
            after = read()
            missing = missing_cores(before, after, threads, cores)
            count = count + 1 if missing > _IN_THE_WAY else 0
            before = after
    except (OSError, ValueError, IndexError):
        return  # no Linux as we know it: nothing to go by
    logger.warning(
        "other programs take %.1f of the %d cores that the engine's %d threads want, and each step "
        "waits for its slowest thread: set OMP_NUM_THREADS to what is free, or "
        "OMP_WAIT_POLICY=PASSIVE",
        *(missing, cores, threads),
    )
