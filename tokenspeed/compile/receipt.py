"""The receipt of a compile: what each pass did to each piece, and how long each phase took."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tokenspeed.passes.manager import Report


class PassReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a pass did (`passes.manager.Report`)."""

    name: str
    matched: int = 0
    expected: int | None = None
    off: str | None = None
    error: str | None = None
    refused: tuple[str, ...] = ()
    seconds: float = 0.0
    saved: int = 0


class Receipt(msgspec.Struct):
    """`pieces` by hash and token range; `graph` are the passes over each captured function;
    `seconds` and `cpu_seconds` (with those of compilers that were run) by phase.
    """

    graph: list[list[PassReceipt]] = []
    pieces: dict[str, dict[str, list[PassReceipt]]] = {}
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
        before = (time.monotonic(), _cpu_seconds())
        yield
        after = (time.monotonic(), _cpu_seconds())
        for times, begin, end in zip((self.seconds, self.cpu_seconds), before, after, strict=True):
            times[phase] = times.get(phase, 0.0) + end - begin


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def receipts_of(reports: Sequence[Report]) -> list[PassReceipt]:
    return [PassReceipt(**_fields(report)) for report in reports]


def encode(receipt: Receipt) -> bytes:
    return msgspec.json.format(msgspec.json.encode(receipt), indent=1)


def decode(data: bytes) -> Receipt:
    """Raises msgspec.DecodeError for anything that `encode` did not write."""
    return msgspec.json.decode(data, type=Receipt)


def _fields(report: Report) -> dict[str, Any]:
    return {field.name: getattr(report, field.name) for field in dataclasses.fields(report)}
