"""What a batch tells of its work on stderr: a bar on a terminal, lines on the log elsewhere."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from tokenspeed.log import logger


@dataclass
class BatchCounts:
    """Lines of the input. Of the `skipped`, answered by an earlier run, `failed_before` failed."""

    completed: int = 0
    failed: int = 0
    skipped: int = 0
    failed_before: int = 0

    @property
    def done(self) -> int:
        return self.completed + self.failed + self.skipped


class BatchProgress:
    """Follows one run. `total` is how many lines the input has, if that is known; `num_generated`
    says how many tokens the engine has made.
    """

    def __init__(
        self,
        counts: BatchCounts,
        total: int | None,
        num_generated: Callable[[], int],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts, self._total = counts, total
        self._num_generated, self._clock = num_generated, clock
        self._began = self._since = clock()
        self._tokens = num_generated()
        self._bar: tqdm[Any] | None = None

    @contextlib.contextmanager
    def shown(self, interval_s: float) -> Iterator[None]:
        """Tell of it meanwhile: on a terminal all the time, else every `interval_s` seconds (0:
        never).
        """
        with tqdm(desc="requests", unit="", total=self._total, disable=None) as bar:
            if not bar.disable:
                self._bar = bar
                with logging_redirect_tqdm():
                    yield
                return
            telling = asyncio.create_task(self._tell(interval_s)) if interval_s else None
            try:
                yield
            finally:
                if telling is not None:
                    telling.cancel()

    def update(self) -> None:
        """Another line has its answer."""
        if self._bar is not None:
            self._bar.update()

    def line(self) -> str:
        """How far the run is, and how fast since the last call."""
        now, tokens, counts = self._clock(), self._num_generated(), self._counts
        seconds = max(now - self._since, 1e-9)
        speed = (tokens - self._tokens) / seconds
        self._since, self._tokens = now, tokens
        of_all = "" if self._total is None else f" of {self._total}"
        share = f" ({counts.done / self._total:.0%})" if self._total else ""
        failed = f", {counts.failed} failed" if counts.failed else ""
        return (
            f"batch: {counts.done}{of_all} done{share}{failed}; {speed:.1f} tokens/s{self._left()}"
        )

    def _left(self) -> str:
        """How long the rest takes if its lines are like those of this run so far."""
        ran = self._counts.completed + self._counts.failed
        if self._total is None or not ran:
            return ""
        seconds = (self._total - self._counts.done) * (self._clock() - self._began) / ran
        return f"; about {tqdm.format_interval(max(seconds, 0))} left"

    async def _tell(self, interval_s: float) -> NoReturn:
        while True:
            await asyncio.sleep(interval_s)
            logger.info("%s", self.line())
