"""Other programs on the engine's cores: counted from what the kernel says, and said once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tokenspeed.engine import core_watch
from tokenspeed.engine.core_watch import CoreTimes, missing_cores

ZERO = CoreTimes(0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("ours", "all_", "threads", "cores", "missing"),
    [
        (2.0, 2.0, 2, 2, 0.0),  # alone
        (1.0, 2.0, 2, 2, 1.0),  # another keeps a core busy
        (0.5, 2.5, 2, 4, 0.0),  # there is room for both
        (2.0, 4.0, 4, 4, 2.0),
        (0.1, 2.0, 2, 2, 0.0),  # the engine rests
        (1.0, 0.9, 2, 2, 0.0),  # clocks are read one after the other
        (1.0, 9.0, 2, 2, 2.0),
    ],
)
def test_what_others_take(
    ours: float, all_: float, threads: int, cores: int, missing: float
) -> None:
    after = CoreTimes(10.0, all_ * 10, ours * 10)
    assert missing_cores(ZERO, after, threads, cores) == pytest.approx(missing)


def test_times_are_those_of_our_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tick = os.sysconf("SC_CLK_TCK")
    (tmp_path / "stat").write_text(
        "cpu  9 9 9 9 9 9 9 9 9 9\n"
        f"cpu0 {tick} {tick} {tick} 77 77 {tick} {tick} {tick} 55 55\n"
        f"cpu1 {tick} 0 0 0 0 0 0 0 0 0\ncpu10 {tick} 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    parent = tmp_path / str(os.getppid())
    parent.mkdir()
    (parent / "stat").write_text(f"7 (a) b) S 1 2 3 4 5 6 7 8 9 10 {3 * tick} {tick} 0 0\n")
    monkeypatch.setattr("time.process_time", lambda: 0.5)
    times = CoreTimes.read(frozenset({0, 1}), tmp_path)
    assert (times.all, times.ours) == (7.0, 4.5)
    assert CoreTimes.read(frozenset(os.sched_getaffinity(0))).all > 0  # as it is here


def readings(*missing: float) -> Iterator[CoreTimes]:
    """Of an engine with two threads on two cores, of which others take so many in each interval."""
    time = ZERO
    yield time
    for share in missing:
        time = CoreTimes(time.clock + 1, time.all + 2, time.ours + 2 - share)
        yield time


def test_it_is_said_once_and_not_of_what_passes(caplog: pytest.LogCaptureFixture) -> None:
    given = readings(0.0, 1.0, 0.0, 1.0, 1.2, 1.0)
    core_watch._watch(2, 2, lambda: next(given), lambda _: None)
    (record,) = caplog.records
    assert "take 1.2 of the 2 cores that the engine's 2 threads want" in record.getMessage()
    assert next(given).clock == 6.0  # nobody looks any more


def test_it_ends_quietly_where_nothing_can_be_read(caplog: pytest.LogCaptureFixture) -> None:
    def read() -> CoreTimes:
        return CoreTimes.read(frozenset({0}), Path("/nowhere"))

    core_watch._watch(2, 2, read, lambda _: None)
    assert not caplog.records
