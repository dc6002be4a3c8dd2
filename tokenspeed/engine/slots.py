"""The worker's memory: what it keeps for each request between steps, on the device.

    tokens[slot]   |<-------- known ids, lengths[slot] of them -------->|  room  |
                                             next input id: the last ^

A decode row continues at `lengths[slot] - 1`, wherever the device stands: the host need not have
seen the step before. Only `extend` moves a length, after a step was sampled; all else may be done
twice, so that a step which failed on the way can be run again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.batch import Row, SlotStart


class Slots:
    """`tokens` [S, max_len] int32 and `lengths` [S] int64 on the device; `tables[g]` [S, pages]
    int64 on the host: page ids by cache group, slot and page index.
    """

    def __init__(
        self,
        num_slots: int,
        max_len: int,
        num_groups: int,
        block_size: int,
        device: torch.device,
    ) -> None:
        self.max_len = max_len
        self.block_size = block_size
        self.tokens = torch.zeros(num_slots, max_len, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        pages = -(-max_len // block_size)
        self.tables = [torch.zeros(num_slots, pages, dtype=torch.int64) for _ in range(num_groups)]
        self._starts: list[SlotStart | None] = [None] * num_slots

    def start(self, start: SlotStart) -> None:
        """A request enters the slot; whoever was there is forgotten."""
        count = len(start.token_ids)
        assert 0 < count <= self.max_len, f"slot {start.slot} cannot hold {count} tokens"
        ids = torch.tensor(start.token_ids, dtype=torch.int32)
        self.tokens[start.slot, :count] = ids.to(self.tokens.device)
        self.lengths[start.slot] = count
        self._starts[start.slot] = start

    def of(self, row: Row) -> SlotStart:
        """The request that `row` runs; its generation must be the slot's."""
        start = self._starts[row.slot]
        assert start is not None and start.generation == row.generation, (
            f"row {row.slot}/{row.generation} does not match its slot"
        )
        return start

    def append_pages(self, row: Row) -> None:
        """Take in the pages that the row brings; its tokens, and what it samples, must fit."""
        assert row.start + row.num_tokens + row.sample <= self.max_len, f"no room for {row}"
        for table, first, pages in zip(self.tables, row.page_starts, row.pages, strict=True):
            if pages:
                table[row.slot, first : first + len(pages)] = torch.tensor(pages)

    def page_tables(self, rows: Sequence[Row]) -> list[list[Tensor]]:
        """By group and row: the page ids that the row's tokens and their past stand in."""
        used = [-(-(row.start + row.num_tokens) // self.block_size) for row in rows]
        return [
            [table[row.slot, :count] for row, count in zip(rows, used, strict=True)]
            for table in self.tables
        ]

    def inputs(self, rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
        """Ids and positions of all query tokens, row after row: int64 [T] each."""
        device = self.tokens.device
        counts = torch.tensor([row.num_tokens for row in rows], device=device)
        slots = torch.tensor([row.slot for row in rows], device=device)
        total = sum(row.num_tokens for row in rows)
        begins = counts.cumsum(0) - counts
        shift = (self.row_starts(rows) - begins).repeat_interleave(counts, output_size=total)
        positions = torch.arange(total, device=device) + shift
        slots = slots.repeat_interleave(counts, output_size=total)
        return self.tokens[slots, positions].long(), positions

    def row_starts(self, rows: Sequence[Row]) -> Tensor:
        """Position of each row's first query token, int64 [R]: a decode row's is the device's."""
        device = self.tokens.device
        planned = torch.tensor([row.start for row in rows], device=device)
        if not any(row.decode for row in rows):
            return planned
        decode = torch.tensor([row.decode for row in rows], device=device)
        slots = torch.tensor([row.slot for row in rows], device=device)
        return torch.where(decode, self.lengths[slots] - 1, planned)

    def extend(self, slots: Tensor, lengths: Tensor, ids: Tensor, accepted: Tensor) -> None:
        """Append a sampled id after the first `lengths` tokens of each slot, where `accepted`. All
        [R].
        """
        kept = self.tokens[slots, lengths].long()
        self.tokens[slots, lengths] = torch.where(accepted, ids, kept).to(torch.int32)
        self.lengths[slots] = torch.where(accepted, lengths + 1, self.lengths[slots])
