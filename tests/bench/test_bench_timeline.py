"""Unions, coverage and the critical path, on spans out of thin air."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.bench.records import Timed
from tokenspeed.bench.timeline import clip, covered, critical_path, unaccounted, union

times = st.integers(0, 40).map(float)
intervals = st.lists(st.tuples(times, times).map(lambda pair: (min(pair), max(pair))), max_size=12)


def leaf(start: float, end: float, phase: str = "p", pid: int = 1) -> Timed:
    return Timed(phase=phase, pid=pid, start=start, end=end, is_leaf=True)


def inside(point: float, found: list[tuple[float, float]]) -> bool:
    return any(start < point < end for start, end in found)


@given(intervals)
def test_a_union_has_the_same_points_and_does_not_touch(found: list[tuple[float, float]]) -> None:
    merged = union(found)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(merged))
    for tick in range(40):
        assert inside(tick + 0.5, merged) == inside(tick + 0.5, found)


@given(intervals, times, times)
def test_what_is_covered_and_what_is_not_make_the_whole(
    found: list[tuple[float, float]], start: float, end: float
) -> None:
    start, end = min(start, end), max(start, end)
    spans = [leaf(*each) for each in found]
    ticks = sum(inside(tick + 0.5, found) for tick in range(int(start), int(end)))
    assert covered(spans, start, end) == ticks
    assert unaccounted(spans, start, end) == (end - start) - ticks
    assert all(start <= first < last <= end for first, last in clip(found, start, end))


@given(intervals, times, times)
def test_the_critical_path_has_neither_gaps_nor_overlaps(
    found: list[tuple[float, float]], start: float, end: float
) -> None:
    start, end = min(start, end), max(start, end)
    path = critical_path([leaf(*each) for each in found], start, end)
    assert sum(part.seconds for part in path) == end - start
    edges = [start, *(part.end for part in path)] if path else []
    assert all(part.start == edge for part, edge in zip(path, edges, strict=False))
    for part in path:
        assert part.span is None or part.span.start <= part.start < part.end <= part.span.end
        if part.span is None:  # nothing that ended, or runs, could stand here
            assert not any(part.start < last <= part.end for _, last in found if _ < last)


def test_the_path_follows_what_ended_last() -> None:
    spans = [
        leaf(0, 2, "import"),
        leaf(2, 3, "weights"),
        leaf(2, 6, "cache_load"),
        leaf(0, 1, "tokenizer", pid=2),
        Timed(phase="scheduler.init", pid=1, start=2, end=7, is_leaf=False),
        leaf(6.5, 7, "executor"),
    ]
    path = [(part.span and part.span.phase, part.seconds) for part in critical_path(spans, 0, 8)]
    assert path == [
        *(("import", 2), ("cache_load", 4), (None, 0.5), ("executor", 0.5), (None, 1)),
    ]
    assert unaccounted(spans, 0, 8) == pytest.approx(1.5)
