"""What the spans of a start say about its time: pure functions on intervals.

Times are seconds; a start goes from the first process's start to the first token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tokenspeed.bench.records import Timed

Interval = tuple[float, float]


@dataclass(frozen=True)
class Waited:
    """A stretch of the critical path: what was waited for; no span means that nothing tells."""

    start: float
    end: float
    span: Timed | None

    @property
    def seconds(self) -> float:
        return self.end - self.start


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as few intervals, ascending, none of which touch."""
    merged: list[Interval] = []
    for start, end in sorted(each for each in intervals if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def clip(intervals: Iterable[Interval], start: float, end: float) -> list[Interval]:
    """What of the intervals lies between `start` and `end`."""
    clipped = ((max(first, start), min(last, end)) for first, last in intervals)
    return [each for each in clipped if each[0] < each[1]]


def covered(spans: Iterable[Timed], start: float, end: float) -> float:
    """Seconds between `start` and `end` in which at least one leaf runs, in any process."""
    leaves = ((span.start, span.end) for span in spans if span.is_leaf)
    return sum(last - first for first, last in union(clip(leaves, start, end)))


def unaccounted(spans: Iterable[Timed], start: float, end: float) -> float:
    """Seconds between `start` and `end` that no leaf covers."""
    return (end - start) - covered(spans, start, end)


def critical_path(spans: Iterable[Timed], start: float, end: float) -> list[Waited]:
    """What was waited for, from `start` to `end` without gaps or overlaps.

    Found from the end backwards: what a leaf waited for last is the leaf that ended last before it
    began. Where work runs side by side this names what ended later, which is what held up the rest.
    """
    leaves = [span for span in spans if span.is_leaf and span.start < span.end]
    path: list[Waited] = []
    now = end
    while now > start:
        span = _last_before(leaves, now)
        if span is None or span.end <= start:
            path.append(Waited(start, now, None))
            break
        until = min(now, span.end)
        if until < now:
            path.append(Waited(until, now, None))
        path.append(Waited(max(start, span.start), until, span))
        now = max(start, span.start)
    return path[::-1]


def _last_before(leaves: Sequence[Timed], now: float) -> Timed | None:
    """The leaf that ended last up to `now`; if none did, one that still runs then, the youngest."""
    ended = [span for span in leaves if span.end <= now]
    if ended:
        return max(ended, key=lambda span: span.end)
    running = [span for span in leaves if span.start < now]
    return max(running, key=lambda span: span.start, default=None)
