"""Larger steps with prompt tokens, piecewise: graphs between attentions, which are planned anew.

How long a step may be for that: as long as the host takes longer to launch its kernels than the
device to run them. Beyond, graphs save nothing, and padding a step to a recorded size costs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.batch import forward_context
from tokenspeed.compile.cudagraph import GraphPool, padded_size
from tokenspeed.compile.piecewise import PiecewiseForward
from tokenspeed.compile.runner import Executable
from tokenspeed.engine.pinned import send
from tokenspeed.engine.prefill_graphs import device_step
from tokenspeed.engine.slots import QueryTokens, Slots
from tokenspeed.kernels.device_step import DeviceAttention

_SMALL = (256, 512, 1024)
_PARTS = 8
"""Above, sizes are multiples of so much of the token budget, of which full steps are recorded."""

_LAUNCH_S = 7e-4
"""Host time of a layer's launches: some 20 ms for the 28 of Qwen3-0.6B, beside an H200."""

_FLOPS = 6e14
"""What matrix products of long steps reach, in bfloat16 on an H200."""


def piece_sizes(budget: int, num_layers: int, num_weights: int) -> tuple[int, ...]:
    """Token counts to record, ascending, for steps of at most `budget` tokens."""
    limit = min(budget, int(_LAUNCH_S * num_layers * _FLOPS / (2 * max(num_weights, 1))))
    multiples = (budget * part // _PARTS for part in range(1, _PARTS + 1))
    sizes = {*_SMALL, *(size for size in multiples if size > _SMALL[-1])}
    return tuple(sorted(size for size in sizes if size <= limit))


class PieceGraphs:
    """The graphs of all sizes, on the engine's thread, under inference mode."""

    def __init__(
        self,
        executable: Executable,
        attention: DeviceAttention,
        slots: Slots,
        pool: GraphPool,
        largest: int,
    ) -> None:
        """For steps of at most `largest` tokens."""
        self._executable = executable
        self._attention = attention
        self._slots = slots
        self._pool = pool
        self._results = attention.room_for_results(largest)
        self._steps: dict[int, PiecewiseForward] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record a size. Nothing of the engine's state changes: all tokens stand in scratch."""
        query = self._slots.query(send(scratch_rows(self._slots, size), self._slots.device), size)
        step = device_step(query, query.slots.shape[0], size, self._slots.max_len)
        with forward_context(self._attention):
            self._attention.plan_device(step)
            self._executable.forward(self._executable.embed(query.ids), query.positions)
            self._attention.plan_device(step, self._results)
            self._steps[size] = PiecewiseForward(self._executable, size, self._pool, self._results)

    def find(self, num_tokens: int) -> PiecewiseForward | None:
        """The smallest graphs for a step of so many tokens."""
        size = padded_size(sorted(self._steps), num_tokens)
        return None if size is None else self._steps[size]


def scratch_rows(slots: Slots, total: int) -> list[tuple[int, int, int, bool]]:
    """Rows for `Slots.query` that stand in scratch, with `total` tokens, none longer than a
    sequence may be.
    """
    counts = (min(slots.max_len, total - begin) for begin in range(0, total, slots.max_len))
    return [(slots.scratch, count, 0, False) for count in counts]


def run_piecewise(graphs: PiecewiseForward, query: QueryTokens, rows: Tensor | None) -> Tensor:
    """Hidden states of the step's tokens, or of `rows`; its attention has been planned."""
    total = query.ids.shape[0]
    graphs.ids[:total].copy_(query.ids)
    graphs.positions[:total].copy_(query.positions)
    return graphs(rows)[: total if rows is None else rows.shape[0]]
