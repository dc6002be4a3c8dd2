"""The progress bar of a run: prompts that are done, and tokens a second in and out so far."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from tokenspeed.request import GenerateRequest, RequestDelta

_SPEEDS_S = 0.2
"""How often the speeds beside the bar change."""


class Progress:
    """Follows the requests of a run, one group a prompt, on `bar`."""

    def __init__(self, bar: tqdm[Any], groups: Sequence[Sequence[GenerateRequest]]) -> None:
        self._bar = bar
        self._group_of = {each.id: group for group in groups for each in group}
        self._num_open = {id(group): len(group) for group in groups}
        self._seen: set[str] = set()
        self._began = self._shown = time.monotonic()
        self._num_in = 0
        self._num_out = 0

    def add(self, delta: RequestDelta, *, is_done: bool) -> None:
        """Take a delta, with which its request `is_done`, or not."""
        group = self._group_of[delta.request_id]
        if delta.request_id not in self._seen:
            self._seen.add(delta.request_id)
            self._num_in += len(group[0].prompt_ids)
        self._num_out += len(delta.token_ids)
        now = time.monotonic()
        if now - self._shown > _SPEEDS_S:
            self._shown = now
            seconds = now - self._began
            self._bar.set_postfix_str(
                f"in: {self._num_in / seconds:.0f} tok/s, out: {self._num_out / seconds:.0f} tok/s"
            )
        if is_done:
            self._num_open[id(group)] -= 1
            self._bar.update(self._num_open[id(group)] == 0)
