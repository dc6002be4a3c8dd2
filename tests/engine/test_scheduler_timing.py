"""What the scheduler tells of a request's time, on a clock that the test turns."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from tokenspeed.engine.step_timing import StepTiming
from tokenspeed.timeline import Timing


class Clock:
    """A second passes whenever it is read."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


@pytest.fixture
def bench() -> Bench:
    """Each step: a second from its plan to its commit, and one more to the next plan."""
    made = Bench(token_budget=8, num_pages=64, max_num_seqs=2)
    made.scheduler._timing = StepTiming(Clock())
    return made


def add(bench: Bench, name: str, num_prompt: int, max_tokens: int) -> None:
    request = bench.add(name, [1 + len(name)] * num_prompt, max_tokens=max_tokens)
    request.timeline.arrived = bench.scheduler._timing.now


def timings(bench: Bench, name: str) -> list[Timing | None]:
    return [delta.timing for delta in bench.deltas if delta.request_id == name]


def test_times_come_with_the_first_token_and_the_last(bench: Bench) -> None:
    add(bench, "a", num_prompt=20, max_tokens=4)
    bench.run()
    # Three chunks: planned at 2, 4 and 6, the last one committed at 7.
    known = Timing(queue_s=1.0, prefill_s=5.0)
    assert timings(bench, "a") == [known, None, None, known]


def test_a_long_prefill_beside_a_decode_is_one_delay(bench: Bench) -> None:
    add(bench, "a", num_prompt=4, max_tokens=8)
    bench.step()
    add(bench, "b", num_prompt=14, max_tokens=8)  # two chunks of 7, beside the decode
    bench.run()
    told = [each for each in timings(bench, "a") if each is not None]
    assert [(each.delay_s, each.num_delays) for each in told] == [(0, 0), (1, 1), (2, 1), (2, 1)]
    assert timings(bench, "b")[-1] == Timing(queue_s=1.0, prefill_s=3.0)


def test_a_prefill_that_comes_before_a_decode_is_one_delay_too() -> None:
    bench = Bench(token_budget=8, max_num_seqs=2, prefill_first=True)
    bench.scheduler._timing = StepTiming(Clock())
    add(bench, "a", num_prompt=4, max_tokens=8)
    bench.step()
    add(bench, "b", num_prompt=14, max_tokens=8)  # a chunk of 8 alone, and 6 before the decode
    bench.run()
    told = [each for each in timings(bench, "a") if each is not None]
    assert (told[-1].delay_s, told[-1].num_delays) == (2, 1)


def test_waiting_for_a_slot_is_queue_time(bench: Bench) -> None:
    for name in ("a", "b", "c"):
        add(bench, name, num_prompt=2, max_tokens=4)
    bench.run()
    last = timings(bench, "c")[-1]
    assert last is not None
    # Planned for the first time after the four steps of those before it.
    assert (last.queue_s, last.prefill_s) == (9.0, 1.0)


def test_a_preemption_is_a_delay() -> None:
    bench = Bench(num_pages=8, block_size=4, token_budget=16, max_num_seqs=2)
    bench.scheduler._timing = StepTiming(Clock())
    add(bench, "a", num_prompt=8, max_tokens=20)
    add(bench, "b", num_prompt=8, max_tokens=20)
    bench.run()
    assert bench.requests["b"].num_preemptions > 0
    last = timings(bench, "b")[-1]
    assert last is not None and last.num_delays >= bench.requests["b"].num_preemptions
    other = timings(bench, "a")[-1]
    assert other is not None and last.delay_s > other.delay_s


def test_tokens_of_launched_steps_are_counted(bench: Bench) -> None:
    add(bench, "a", num_prompt=20, max_tokens=4)
    bench.run()
    assert bench.scheduler.stats.scheduled_tokens == 20 + 3
