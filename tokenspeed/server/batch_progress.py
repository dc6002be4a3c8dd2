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

from tokenspeed.engine.messages import Stats
from tokenspeed.log import logger

_REFRESH_S = 0.5
"""How often the bar changes while no line ends."""


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
    """Follows one run. `total` is how many lines the input has, if that is known; `stats` are the
    engine's, which tell of answers that are not whole yet, too.
    """

    def __init__(
        self,
        counts: BatchCounts,
        total: int | None,
        stats: Callable[[], Stats],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._counts, self._total = counts, total
        self._stats, self._clock = stats, clock
        self._began = self._since = clock()
        self._before = stats().generation_tokens
        self._told = 0
        self._bar: tqdm[Any] | None = None

    @contextlib.contextmanager
    def shown(self, interval_s: float) -> Iterator[None]:
        """Tell of it meanwhile: on a terminal all the time, else every `interval_s` seconds (0:
        never).
        """
        form = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        with tqdm(desc="requests", total=self._total, disable=None, bar_format=form) as bar:
            telling: asyncio.Task[NoReturn] | None = None
            with contextlib.ExitStack() as stack:
                if not bar.disable:
                    self._bar = bar
                    stack.enter_context(logging_redirect_tqdm())
                    telling = asyncio.create_task(self._refresh(bar))
                elif interval_s:
                    telling = asyncio.create_task(self._tell(interval_s))
                try:
                    yield
                finally:
                    if telling is not None:
                        telling.cancel()

    def update(self) -> None:
        """Another line has its answer."""
        if self._bar is not None:
            self._bar.set_postfix_str(self.postfix(), refresh=False)
            self._bar.update()

    def postfix(self) -> str:
        """What stands beside the bar: tokens so far, and how fast they came."""
        seconds = max(self._clock() - self._began, 1e-9)
        num_tokens = self._num_tokens()
        return f"{num_tokens} tokens, {num_tokens / seconds:.1f} tokens/s"

    def line(self) -> str:
        """How far the run is, and how fast since the last call."""
        now, counts, num_tokens = self._clock(), self._counts, self._num_tokens()
        speed = (num_tokens - self._told) / max(now - self._since, 1e-9)
        self._since, self._told = now, num_tokens
        of_all = "" if self._total is None else f" of {self._total}"
        share = f" ({counts.done / self._total:.0%})" if self._total else ""
        failed = f", {counts.failed} failed" if counts.failed else ""
        done = f"{counts.done}{of_all} done{share}{failed}, {self._stats().num_running} running"
        return f"batch: {done}; {num_tokens} tokens, {speed:.1f} tokens/s{self._left()}"

    def _num_tokens(self) -> int:
        """Generated in this run, those of answers that are not whole included."""
        return self._stats().generation_tokens - self._before

    def _left(self) -> str:
        """How long the rest takes if its lines are like those of this run so far."""
        ran = self._counts.completed + self._counts.failed
        if self._total is None or not ran:
            return ""
        seconds = (self._total - self._counts.done) * (self._clock() - self._began) / ran
        return f"; about {tqdm.format_interval(max(seconds, 0))} left"

    async def _refresh(self, bar: tqdm[Any]) -> NoReturn:
        while True:
            await asyncio.sleep(_REFRESH_S)
            bar.set_postfix_str(self.postfix())

    async def _tell(self, interval_s: float) -> NoReturn:
        while True:
            await asyncio.sleep(interval_s)
            logger.info("%s", self.line())
