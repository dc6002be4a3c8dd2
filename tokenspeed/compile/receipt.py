"""The receipt of a compile: what each pass did to each piece, and how long each phase took."""

from __future__ import annotations

import contextlib
import resource
import time
from collections import Counter
from collections.abc import Iterator

import msgspec

from tokenspeed.passes.manager import PassReport


class Receipt(msgspec.Struct):
    """`pieces` by hash and token range; `graph` are the passes over each captured function;
    `seconds` and `cpu_seconds` (with those of compilers that were run) by phase.
    """

    graph: list[list[PassReport]] = []
    pieces: dict[str, dict[str, list[PassReport]]] = {}
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}

    def totals(self) -> dict[str, int]:
        """Matches by pass over all pieces and ranges."""
        totals: Counter[str] = Counter()
        lists = [*self.graph, *(each for piece in self.pieces.values() for each in piece.values())]
        for report in (report for reports in lists for report in reports):
            totals[report.name] += report.matched
        return {name: count for name, count in totals.items() if count}

    @contextlib.contextmanager
    def spend(self, phase: str) -> Iterator[None]:
        """Add the time of a block to a phase."""
        before = (time.monotonic(), cpu_seconds())
        yield
        after = (time.monotonic(), cpu_seconds())
        for times, begin, end in zip((self.seconds, self.cpu_seconds), before, after, strict=True):
            times[phase] = times.get(phase, 0.0) + end - begin


def cpu_seconds() -> float:
    """Of this process, and of those that it has waited for."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def encode(receipt: Receipt) -> bytes:
    return msgspec.json.format(msgspec.json.encode(receipt), indent=1)


def decode(data: bytes) -> Receipt:
    """Raises msgspec.DecodeError for anything that `encode` did not write."""
    return msgspec.json.decode(data, type=Receipt)
