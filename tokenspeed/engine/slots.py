"""The worker's memory: what it keeps for each request between steps, on the device.

    tokens[slot]   |<-------- known ids, lengths[slot] of them -------->|  room  |
                                             next input id: the last ^

A decode row continues at `lengths[slot] - 1`, wherever the device stands: the host need not have
seen the step before. Only sampling moves a length (`extend`, or a recorded step), and `retract`
moves it back; all else may be done twice, so that a step which failed can be run again.

One slot more than requests may hold is the scratch slot: one token long for ever, on a page of its
own. Rows that only fill a batch up to the size of a CUDA graph stand there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tokenspeed.batch import Row, SlotStart
from tokenspeed.engine.pinned import send


@dataclass(frozen=True)
class QueryTokens:
    """The T query tokens of a step's R rows, on the device, int64. By token: `ids`, `positions` and
    the row that owns it. By row: its slot, where its tokens end, and the length of its context.
    """

    ids: Tensor
    positions: Tensor
    owners: Tensor
    slots: Tensor
    ends: Tensor
    lengths: Tensor


class Slots:
    """`tokens` [S + 1, max_len] int32 and `lengths` [S + 1] int64 on the device; `tables[g]`
    [S + 1, pages] int64 on the host: page ids by cache group, slot and page index. An attention
    that looks pages up on the device reads `device_tables[g]`, the same in int32.
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
        *,
        scratch_page: int | None = None,
    ) -> None:
        """`scratch_page` belongs to the scratch slot; with it there are tables on the device."""
        self.max_len = max_len
        self.block_size = block_size
        self.scratch = num_slots
        self.device = device
        self.tokens = torch.zeros(num_slots + 1, max_len, dtype=torch.int32, device=device)
        self.lengths = torch.ones(num_slots + 1, dtype=torch.int64, device=device)
        shape = num_slots + 1, -(-max_len // block_size)
        self.tables = [torch.zeros(shape, dtype=torch.int64) for _ in range(num_groups)]
        self.device_tables: list[Tensor] = []
        if scratch_page is not None:
            self.device_tables = [
                torch.full(shape, scratch_page, dtype=torch.int32, device=device)
                for _ in range(num_groups)
            ]
        self._starts: list[SlotStart | None] = [None] * num_slots

    def start(self, start: SlotStart) -> None:
        """A request enters the slot; whoever was there is forgotten."""
        count = len(start.token_ids)
        assert 0 < count <= self.max_len, f"slot {start.slot} cannot hold {count} tokens"
        self.tokens[start.slot, :count] = send(start.token_ids, self.device, torch.int32)
        self.lengths[start.slot].fill_(count)  # an assignment would wait for the device
        self._starts[start.slot] = start

    def of(self, row: Row) -> SlotStart:
        """The request that `row` runs; its generation must be the slot's."""
        start = self._starts[row.slot]
        assert start is not None and start.generation == row.generation, (
            f"row {row.slot}/{row.generation} does not match its slot"
        )
        return start

    def append_pages(self, rows: Sequence[Row]) -> None:
        """Take in the pages that the rows bring; their tokens, and what they sample, must fit."""
        for row in rows:
            assert row.start + row.num_tokens + row.sample <= self.max_len, f"no room for {row}"
        for group, table in enumerate(self.tables):
            slots: list[int] = []
            indices: list[int] = []
            pages: list[int] = []
            for row in rows:
                first, new = row.page_starts[group], row.pages[group]
                slots += [row.slot] * len(new)
                indices += range(first, first + len(new))
                pages += new
            if not pages:
                continue
            places = np.array((slots, indices, pages))
            table.numpy()[places[0], places[1]] = places[2]
            if self.device_tables:
                on_device = send(places, self.device)
                self.device_tables[group][on_device[0], on_device[1]] = on_device[2].int()

    def page_tables(self, rows: Sequence[Row]) -> list[list[Tensor]]:
        """By group and row: the page ids that the row's tokens and their past stand in."""
        used = [-(-(row.start + row.num_tokens) // self.block_size) for row in rows]
        return [
            [table[row.slot, :count] for row, count in zip(rows, used, strict=True)]
            for table in self.tables
        ]

    def inputs(self, rows: Sequence[Row]) -> QueryTokens:
        """Ids, positions and rows of all query tokens, row after row."""
        numbers = [(row.slot, row.num_tokens, row.start, row.decode) for row in rows]
        return self.query(send(numbers, self.device), sum(row.num_tokens for row in rows))

    def query(self, numbers: Tensor, total: int) -> QueryTokens:
        """The same for rows on the device, int64 [R, 4]: slot, query tokens (`total` in all, none
        is allowed), planned start, and whether it is a decode row.
        """
        slots, counts, planned, decode = numbers.unbind(1)
        # A decode row starts where the device stands.
        starts = torch.where(decode.bool(), self.lengths[slots] - 1, planned)
        ends = counts.cumsum(0)
        order = torch.arange(len(numbers), device=self.device)
        owners = order.repeat_interleave(counts, output_size=total)
        positions = torch.arange(total, device=self.device) + (starts - ends + counts)[owners]
        ids = self.tokens[slots[owners], positions].long()
        return QueryTokens(ids, positions, owners, slots, ends, starts + counts)

    def extend(self, slots: Tensor, lengths: Tensor, ids: Tensor, accepted: Tensor) -> None:
        """Append a sampled id after the first `lengths` tokens of each slot, where `accepted`. All
        [R].
        """
        kept = self.tokens[slots, lengths].long()
        self.tokens[slots, lengths] = torch.where(accepted, ids, kept).to(torch.int32)
        self.lengths[slots] = torch.where(accepted, lengths + 1, self.lengths[slots])

    def retract(self, slots: Tensor, lengths: Tensor) -> None:
        """Forget what was appended after the first `lengths` tokens of each slot. Both [R]."""
        self.lengths[slots] = lengths
