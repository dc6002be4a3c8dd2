"""What each HTTP process of a server has in the engine's queue, in memory that all of them map.

A process writes its own row alone and reads all. It adds first and looks then, so that two that add
at once may both be refused but never both let in; nobody waits for a lock, nor for one who has
died. Each entry is one aligned word, written at once.
"""

from __future__ import annotations

import mmap
import time
from pathlib import Path

_SAMPLES, _TOKENS, _BUSY_SINCE = range(3)
_COLUMNS = 3
_ROW_BYTES = 8 * _COLUMNS
_NS = 1_000_000_000


class QueueTable:
    """The table as the process of row `row` sees it."""

    def __init__(self, memory: memoryview, row: int) -> None:
        """`memory`: 64-bit words, zero at first."""
        self.row = row
        self._memory, self._start = memory, row * _COLUMNS

    @classmethod
    def alone(cls) -> QueueTable:
        """For a process that shares its engine with no other."""
        return cls(memoryview(bytearray(_ROW_BYTES)).cast("q"), 0)

    @classmethod
    def create(cls, path: Path, num_rows: int) -> QueueTable:
        """A new file with so many rows; the first is the caller's."""
        path.write_bytes(bytes(num_rows * _ROW_BYTES))
        return cls.open(path, 0)

    @classmethod
    def open(cls, path: Path, row: int) -> QueueTable:
        with path.open("r+b") as file:
            return cls(memoryview(mmap.mmap(file.fileno(), 0)).cast("q"), row)

    def occupy(self, num_samples: int, num_tokens: int) -> None:
        """Add to the own row; negative numbers give back."""
        self._memory[self._start + _SAMPLES] += num_samples
        self._memory[self._start + _TOKENS] += num_tokens

    def set_busy(self, is_busy: bool) -> None:
        """Whether the own requests are in the engine from now on."""
        self._memory[self._start + _BUSY_SINCE] = time.monotonic_ns() if is_busy else 0

    def clear(self, row: int) -> None:
        """The process of that row is gone."""
        start = row * _COLUMNS
        for column in range(_COLUMNS):
            self._memory[start + column] = 0

    @property
    def own(self) -> tuple[int, int]:
        """Samples and prompt tokens of this process."""
        return self._memory[self._start + _SAMPLES], self._memory[self._start + _TOKENS]

    @property
    def num_samples(self) -> int:
        """Of all processes."""
        return sum(self._memory[_SAMPLES::_COLUMNS])

    @property
    def num_tokens(self) -> int:
        """Of all processes."""
        return sum(self._memory[_TOKENS::_COLUMNS])

    @property
    def busy_since(self) -> float | None:
        """Since when one of them has had requests in the engine, on the monotonic clock; None if
        none has.
        """
        moments = [moment for moment in self._memory[_BUSY_SINCE::_COLUMNS] if moment]
        return min(moments) / _NS if moments else None
