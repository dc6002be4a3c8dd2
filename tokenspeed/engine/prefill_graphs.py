"""Small steps with prompt tokens as graphs: launching their kernels one by one would take the host
longer than the device needs to run them.

A step is recorded for some token counts and for `ROWS` rows. A real step has fewer of both: the
tokens left over are one more row, which stands in the scratch slot, and the rows left over have no
tokens. What the rows are is read from one small tensor, so a step sends nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.batch import Row, forward_context
from tokenspeed.compile.cudagraph import GraphPool, Recording, padded_size
from tokenspeed.compile.runner import Executable
from tokenspeed.engine.pinned import send
from tokenspeed.engine.slots import QueryTokens, Slots
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.device_step import DeviceAttention, DeviceStep

ROWS = 8
"""More rows have more tokens, mostly, and then the device is the slower one."""

SIZES = (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Token counts: at most half as many again as a step has. From some 1000 tokens on, the host keeps
up with a small model, and long before with a large one.
"""


class PrefillGraphs:
    """The graphs of all sizes, on the engine's thread, under inference mode."""

    def __init__(
        self,
        executable: Executable,
        attention: DeviceAttention,
        slots: Slots,
        pool: GraphPool,
    ) -> None:
        self._executable = executable
        self._attention = attention
        self._slots = slots
        self._pool = pool
        self._steps: dict[int, Recording] = {}
        self._numbers = send(self._rows_of([], 1), slots.device)

    @property
    def sizes(self) -> list[int]:
        """What is recorded, ascending."""
        return sorted(self._steps)

    @torch.inference_mode()
    def record(self, size: int) -> None:
        """Record a size, which fits a slot. Nothing of the engine's state changes: all tokens stand
        in scratch.
        """
        assert size <= self._slots.max_len, f"no slot has {size} tokens"
        self._numbers.copy_(send(self._rows_of([], size), self._slots.device))
        self._steps[size] = Recording(lambda: self._forward(size), self._pool)

    def forward(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Enqueue the forward of these rows: logits [R, V] of the last token of each, lengths [R]
        of their contexts, and slots [R], all of which the next call overwrites. None: no graph.
        """
        total = sum(row.num_tokens for row in rows)
        size = padded_size(self.sizes, total) if len(rows) <= ROWS else None
        if size is None:
            return None
        self._numbers.copy_(send(self._rows_of(rows, size), self._slots.device), non_blocking=True)
        step = self._steps[size]
        step.replay()
        logits, lengths, slots = (result[: len(rows)] for result in step.results)
        return logits, lengths, slots

    def _rows_of(self, rows: Sequence[Row], size: int) -> list[tuple[int, int, int, bool]]:
        """The rows, one of scratch with the tokens left over, and rows without any."""
        scratch = self._slots.scratch
        found = [(row.slot, row.num_tokens, row.start, row.decode) for row in rows]
        found.append((scratch, size - sum(row.num_tokens for row in rows), 0, False))
        return found + [(scratch, 0, 0, False)] * (ROWS + 1 - len(found))

    def _forward(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        query = self._slots.query(self._numbers, size)
        self._attention.plan_device(device_step(query, ROWS + 1, size, self._slots.max_len))
        last = (query.ends[:ROWS] - 1).clamp(min=0)
        with forward_context(self._attention):
            x = self._executable.embed(query.ids)
            hidden = self._executable.forward(x, query.positions, last)
        return self._executable.head(hidden), query.lengths[:ROWS], query.slots[:ROWS]


def device_step(
    query: QueryTokens,
    num_rows: int,
    num_tokens: int,
    max_context_len: int,
    num_decodes: int = 0,
    host: AttentionStep | None = None,
) -> DeviceStep:
    """Query tokens as attention backends on a device see them: all rows behind `num_decodes` may be
    chunks, of which `host` is what the host knows.
    """
    return DeviceStep(
        num_rows=num_rows,
        num_tokens=num_tokens,
        max_query_len=1 if num_decodes == num_rows else num_tokens,
        max_context_len=max(max_context_len, num_tokens),
        slots=query.slots.int(),
        query_starts=F.pad(query.ends, (1, 0)).int(),
        context_lens=query.lengths.int(),
        positions=query.positions,
        token_rows=query.owners.int(),
        num_decodes=num_decodes,
        host=host,
    )
