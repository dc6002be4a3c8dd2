"""A request's stamps: what its timing says after each thing that can happen to it."""

from __future__ import annotations

from tokenspeed.timeline import Timeline, Timing


def test_a_request_that_is_never_scheduled_has_no_times() -> None:
    timeline = Timeline(arrived=5.0)
    assert timeline.news(is_last=False) is None
    assert timeline.news(is_last=True) == Timing()


def test_queue_and_prefill_are_told_once() -> None:
    timeline = Timeline(arrived=5.0)
    timeline.schedule(6.5)
    assert timeline.news(is_last=False) is None
    timeline.end_prefill(6.75)
    assert timeline.news(is_last=False) == Timing(queue_s=1.5, prefill_s=0.25)
    timeline.decode(0.5, with_prefills=False)
    assert timeline.news(is_last=False) is None
    assert timeline.news(is_last=True) == Timing(queue_s=1.5, prefill_s=0.25)


def test_prefills_of_others_are_one_delay_until_a_step_without_them() -> None:
    timeline = Timeline(arrived=0.0)
    timeline.schedule(0.0)
    timeline.end_prefill(0.0)
    for with_prefills in (True, True, False, False, True):
        timeline.decode(0.5, with_prefills=with_prefills)
    found = timeline.news(is_last=False)
    assert found == Timing(delay_s=1.5, num_delays=2)


def test_a_preemption_is_a_delay_until_the_request_decodes_again() -> None:
    timeline = Timeline(arrived=0.0)
    timeline.schedule(1.0)
    timeline.preempt(1.5)  # in its prefill: nothing was decoded yet
    timeline.schedule(2.0)
    timeline.end_prefill(3.0)
    timeline.preempt(4.0)
    timeline.preempt(5.0)  # again, before it decoded
    timeline.schedule(6.0)
    timeline.end_prefill(7.5)
    found = timeline.news(is_last=False)
    assert found == Timing(queue_s=1.0, prefill_s=2.0, delay_s=3.5, num_delays=1)
