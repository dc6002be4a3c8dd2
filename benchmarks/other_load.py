"""How busy other processes kept the machine during a benchmark."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Self

_TICKS = os.sysconf("SC_CLK_TCK")


class OtherLoad:
    """Cores that processes other than this one and its descendants used, on average over a `with`
    block: what /proc/stat counts as busy, less what this tree of processes used. (Time stolen by a
    hypervisor is not in it.)
    """

    cores: float

    def __enter__(self) -> Self:
        self._before = (time.monotonic(), _busy_s(), tree_cpu_s())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        after = (time.monotonic(), _busy_s(), tree_cpu_s())
        wall, busy, own = (b - a for a, b in zip(self._before, after, strict=True))
        self.cores = max(0.0, (busy - own) / wall)


def tree_cpu_s() -> float:
    """CPU-seconds of this process and its descendants, those that ended and were waited for too."""
    parents, ticks = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in brackets, may hold anything; then come state and parent (proc(5)).
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        ticks[pid] = sum(map(int, fields[11:15]))
    return sum(ticks[pid] for pid in ticks if _descends(pid, parents)) / _TICKS


def resident_mib(pid: int | str = "self") -> float:
    """Memory of a process that is resident now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents and pid != os.getpid():
        pid = parents[pid]
    return pid == os.getpid()


def _busy_s() -> float:
    line = Path("/proc/stat").read_text().splitlines()[0]
    user, nice, system, _, _, irq, softirq = map(int, line.split()[1:8])
    return (user + nice + system + irq + softirq) / _TICKS
