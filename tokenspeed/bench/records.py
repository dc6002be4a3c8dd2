"""Start-up records, out of the log of a start: the spans of all its processes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

MARK = "startup_timing "
_MAX_LINE = 65536
_MAX_PID = 1 << 22
_MAX_WALL_NS = 1 << 62


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One line, as `tokenspeed.spans` writes it. Keys that are not listed are ignored."""

    phase: str
    pid: int
    rank: int
    role: str | None
    span_id: int
    parent_id: int | None
    event: Literal["start", "end"]
    wall_time_ns: int
    status: str | None = None


class Timed(msgspec.Struct, frozen=True, kw_only=True):
    """A span that has ended; `start` and `end` are seconds of wall time since the epoch."""

    phase: str
    pid: int
    start: float
    end: float
    is_leaf: bool

    @property
    def seconds(self) -> float:
        return self.end - self.start


def parse(lines: Iterable[str]) -> list[Record]:
    """The records among the lines of a log; what is none, or is damaged, is skipped."""
    found = []
    decoder = msgspec.json.Decoder(Record)
    for line in lines:
        _, mark, text = line.partition(MARK)
        if not mark or len(text) > _MAX_LINE:
            continue
        try:
            record = decoder.decode(text)
        except msgspec.DecodeError:
            continue
        if 0 <= record.wall_time_ns < _MAX_WALL_NS and 0 < record.pid <= _MAX_PID:
            found.append(record)
    return found


def timed(records: Iterable[Record]) -> list[Timed]:
    """The spans that have ended, in order of their start. A leaf is a span without children, be
    those ended or not.
    """
    starts: dict[tuple[int, int], Record] = {}
    ends: dict[tuple[int, int], Record] = {}
    for record in records:
        (starts if record.event == "start" else ends)[record.pid, record.span_id] = record
    parents = {(record.pid, record.parent_id) for record in starts.values()}
    spans = [
        Timed(
            phase=starts[key].phase,
            pid=starts[key].pid,
            start=starts[key].wall_time_ns / 1e9,
            # A clock that was set back meanwhile must not make a span of negative length.
            end=max(starts[key].wall_time_ns, end.wall_time_ns) / 1e9,
            is_leaf=key not in parents,
        )
        for key, end in ends.items()
        if key in starts
    ]
    return sorted(spans, key=lambda each: (each.start, each.end))
