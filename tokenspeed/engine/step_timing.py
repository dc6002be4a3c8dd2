"""How steps follow each other in time, and what that means for the requests in them.

Steps overlap: a step lasts from the commit before it, or from its own planning if that came later,
to its commit. One clock reading a step and a few a request are all that this costs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

from tokenspeed.batch import Batch
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.record import State


class StepTiming:
    """Stamps timelines. `now` is the time of the latest plan or commit."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._planned: deque[float] = deque()
        self._had_prefills = False
        self._committed = self.now = clock()

    def begin_plan(self) -> None:
        self.now = self._clock()

    def launch(self) -> None:
        """The plan has become a step."""
        self._planned.append(self.now)

    def commit(self, batch: Batch, running: Sequence[Admission]) -> None:
        """The oldest launched step has ended; `running` are those who had a slot until now."""
        began = max(self._committed, self._planned.popleft())
        self._committed = self.now = self._clock()
        # Rows are in the order of planning: all decodes come first, or last.
        has_prefills = not (batch.rows[0].decode and batch.rows[-1].decode)
        if has_prefills or self._had_prefills:
            for each in running:
                if each.request.state is State.DECODING:
                    timeline = each.request.timeline
                    timeline.decode(self.now - began, with_prefills=has_prefills)
        self._had_prefills = has_prefills
