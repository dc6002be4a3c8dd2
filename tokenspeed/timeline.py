"""When things happened to one request in the engine, on the host's clock: no device is waited for.

    arrived --queue--> scheduled --prefill--> first token --decode, with delays--> end

A delay is decoding that other requests' prefills slowed down, or a preemption until the request
decodes again. Steps that follow each other with prefills in them are one delay.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import msgspec


class Timing(msgspec.Struct, frozen=True, array_like=True):
    """What is known so far, in seconds; a time that has not come to its end is 0."""

    queue_s: float = 0.0
    """From the arrival in the engine to the first step with a row of the request."""
    prefill_s: float = 0.0
    """From there to the end of the first prefill, which brings the first token."""
    delay_s: float = 0.0
    num_delays: int = 0


@dataclass(slots=True)
class Timeline:
    """The engine's stamps of one request. All times are `time.monotonic` seconds."""

    arrived: float = field(default_factory=time.monotonic)
    _scheduled: float | None = None
    _prefilled: float | None = None
    _preempted: float | None = None
    _delay_s: float = 0.0
    _num_delays: int = 0
    _is_delayed: bool = False
    _has_news: bool = False

    def schedule(self, now: float) -> None:
        """A step will have a row of it; only the first time counts."""
        if self._scheduled is None:
            self._scheduled = now

    def end_prefill(self, now: float) -> None:
        """All that was known is computed: the first time, or again after a preemption."""
        self._has_news = True
        if self._prefilled is None:
            self._prefilled = now
        if self._preempted is not None:
            self._delay_s += now - self._preempted
            self._preempted = None

    def preempt(self, now: float) -> None:
        """Its pages were taken. In a prefill that is no delay of decoding."""
        if self._prefilled is not None and self._preempted is None:
            self._preempted = now
            self._num_delays += 1

    def decode(self, step_s: float, *, with_prefills: bool) -> None:
        """A step passed in which it decoded, or might have, beside prefills of others or not."""
        if with_prefills:
            self._num_delays += not self._is_delayed
            self._delay_s += step_s
            self._has_news = True
        self._is_delayed = with_prefills

    def news(self, *, is_last: bool) -> Timing | None:
        """The timing, if it has changed since it was asked for, or nobody will ask again."""
        if not (self._has_news or is_last):
            return None
        self._has_news = False
        scheduled, prefilled = self._scheduled, self._prefilled
        return Timing(
            queue_s=0.0 if scheduled is None else scheduled - self.arrived,
            prefill_s=0.0 if scheduled is None or prefilled is None else prefilled - scheduled,
            delay_s=self._delay_s,
            num_delays=self._num_delays,
        )
