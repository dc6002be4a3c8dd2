"""Decode steps as graphs: every row has one query token, so a step is known by its size alone.

    forward   row slots -> next input ids and positions -> pages, attention -> hidden -> logits
    choose    logits -> likeliest ids, appended to the slots: for steps in which all rows are greedy
    draw      logits -> sampled ids, appended to the slots: each row as its request asks

All are recorded for some batch sizes. A step takes the next larger one; the rows that are left
over stand in the scratch slot. Everything a graph needs is read from the slots on the device, so a
step sends nothing but the slots of its rows, and those only when they change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.batch import forward_context
from tokenspeed.compile.cudagraph import GraphPool, Recording, padded_size
from tokenspeed.compile.runner import Executable
from tokenspeed.engine.pinned import send
from tokenspeed.engine.sampler import Sampled, SamplingPlan
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.device_step import DeviceAttention, DeviceStep
from tokenspeed.kernels.greedy_step import append_rows, begin_rows, end_rows
from tokenspeed.kernels.sample_rows import NOT_FINITE, RowParams, sample_rows


@dataclass(frozen=True)
class UniformStep:
    """What the graphs of one size work on: logits [B, V] in the model's dtype, lengths [B]."""

    forward: Recording
    choose: Recording
    draw: Recording

    @property
    def logits(self) -> Tensor:
        return self.forward.results[0]

    @property
    def lengths(self) -> Tensor:
        return self.forward.results[1]


class DecodeGraphs:
    """The graphs of all sizes. Everything runs on the engine's thread, under inference mode."""

    def __init__(
        self,
        executable: Executable,
        attention: DeviceAttention,
        slots: Slots,
        sizes: Sequence[int],
        pool: GraphPool,
    ) -> None:
        self._executable = executable
        self._attention = attention
        self._slots = slots
        self._steps: dict[int, UniformStep] = {}
        largest, device = max(sizes), slots.device
        self._pool = pool
        self._row_slots = torch.full((largest,), slots.scratch, device=device)
        self._order = torch.arange(largest + 1, dtype=torch.int32, device=device)
        self._held: list[int] = []
        self._params = RowParams(
            temperature=torch.zeros(largest, device=device),
            top_k=torch.zeros(largest, dtype=torch.int32, device=device),
            top_p=torch.ones(largest, device=device),
            log_min_p=torch.full((largest,), -math.inf, device=device),
            seeds=torch.zeros(largest, dtype=torch.int64, device=device),
            samples=torch.zeros(largest, dtype=torch.int64, device=device),
        )
        self._asked: RowParams | None = None
        self.seen: Counter[int] = Counter()
        """Steps so far, by their rows."""

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record a size. Nothing of the engine's state changes: all rows stand in scratch."""
        self._hold([])

        def forward() -> tuple[Tensor, ...]:
            return self._forward(size)

        recorded = Recording(forward, self._pool)
        logits, lengths = recorded.results

        def choose() -> tuple[Tensor, ...]:
            return self._choose(size, logits)

        def draw() -> tuple[Tensor, ...]:
            return self._draw(size, logits, lengths)

        recordings = [Recording(run, self._pool) for run in (choose, draw)]
        recorded.release(0)  # all sizes' logits together would be several times the largest's
        self._steps[size] = UniformStep(recorded, *recordings)

    @property
    def sizes(self) -> list[int]:
        """What is recorded, ascending."""
        return sorted(self._steps)

    def forward(self, slots: list[int]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Enqueue the forward of one token for each of `slots`: logits [R, V], lengths [R] and
        slots [R], all of which the next call overwrites, and the logits any other recording of the
        pool. None: no graph is that large.
        """
        self.seen[len(slots)] += 1
        size = padded_size(self.sizes, len(slots))
        if size is None:
            return None
        self._hold(slots)
        step, count = self._steps[size], len(slots)
        step.forward.replay()
        return step.logits[:count], step.lengths[:count], self._row_slots[:count]

    def sample(self, plan: SamplingPlan) -> Sampled:
        """Enqueue sampling of what `forward` just left, and append it to the slots. The plan, for
        as many rows, has no edits.
        """
        count = len(plan.params.seeds)
        size = padded_size(self.sizes, count)
        assert size is not None and count == len(self._held), "sample() of another step"
        step = self._steps[size]
        if not plan.is_greedy:
            self._ask(plan.params)
        recorded = step.choose if plan.is_greedy else step.draw
        recorded.replay()
        ids, status = recorded.results
        return Sampled(ids=ids[:count], status=status[:count])

    def _ask(self, params: RowParams) -> None:
        """Make `params` those of the next replay; the rows that are left over cost the least."""
        if params is self._asked:
            return
        count = len(params.seeds)
        for kept, new in zip(self._params, params, strict=True):
            kept[:count].copy_(new)
        self._params.temperature[count:] = 0.0
        self._asked = params

    def _hold(self, slots: list[int]) -> None:
        """Make `slots` the rows of the next replay. Mostly they are those of the last."""
        if slots == self._held:
            return
        rows = slots + [self._slots.scratch] * (self._row_slots.shape[0] - len(slots))
        self._row_slots.copy_(send(rows, self._slots.device), non_blocking=True)
        self._held = list(slots)

    def _forward(self, size: int) -> tuple[Tensor, Tensor]:
        slots = self._slots
        rows = self._row_slots[:size]
        ids, positions, lengths = begin_rows(slots.tokens, slots.lengths, rows)
        order = self._order[: size + 1]
        self._attention.plan_device(
            DeviceStep(
                num_rows=size,
                num_tokens=size,
                max_query_len=1,
                max_context_len=slots.max_len,
                slots=rows.int(),
                query_starts=order,
                context_lens=lengths.int(),
                positions=positions,
                token_rows=order[:size],
            )
        )
        with forward_context(self._attention):
            hidden = self._executable.forward(self._executable.embed(ids), positions)
        return self._executable.head(hidden), lengths

    def _choose(self, size: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        slots = self._slots
        ids, is_bad = end_rows(logits, slots.tokens, slots.lengths, self._row_slots[:size])
        return ids, is_bad * NOT_FINITE

    def _draw(self, size: int, logits: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        slots, params = self._slots, (each[:size] for each in self._params)
        ids, status = sample_rows(logits, lengths, *params, False, False)
        append_rows(slots.tokens, slots.lengths, self._row_slots[:size], ids, status)
        return ids, status
