"""The host's part of steps: what it does itself, and never what it waits for."""

from __future__ import annotations

from typing import Any

import pytest
from engine_tiny import request, run, tiny_engine

from tokenspeed.batch import Batch, StepResult
from tokenspeed.engine import host_time


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Timed:
    """A step whose verbs take time on the clock."""

    def __init__(self, step: Any, clock: Clock) -> None:
        self._step, self._clock, self.batch = step, clock, step.batch

    def sample(self, masks: Any = None) -> None:
        self._clock.now += 2
        self._step.sample(masks)

    def wait(self) -> None:
        self._clock.now += 1000
        self._step.wait()

    def result(self) -> StepResult:
        self._clock.now += 4
        result: StepResult = self._step.result()
        return result


@pytest.mark.parametrize("is_serial", [True, False])
def test_the_host_s_part_leaves_out_the_device_s(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, is_serial: bool
) -> None:
    engine = tiny_engine(tiny_model, level=0, disable_overlap_schedule=is_serial)
    clock, launch = Clock(), engine._worker.launch
    monkeypatch.setattr(host_time, "time", clock)

    def timed(batch: Batch) -> Timed:
        clock.now += 1
        return Timed(launch(batch), clock)

    monkeypatch.setattr(engine._worker, "launch", timed)
    schedule, commit = engine._scheduler.schedule, engine._scheduler.commit

    def scheduled() -> Any:
        batch = schedule()
        clock.now += 8 * (batch is not None)
        return batch

    def committed(result: StepResult) -> Any:
        clock.now += 16
        return commit(result)

    monkeypatch.setattr(engine._scheduler, "schedule", scheduled)
    monkeypatch.setattr(engine._scheduler, "commit", committed)
    run(engine, [request("a", [1, 2, 3], max_tokens=4)])
    stats = engine.stats
    assert stats.steps >= 4
    assert stats.host_launch_s == (1 + 2 + 8) * stats.steps
    assert stats.host_commit_s == (4 + 16) * stats.steps
