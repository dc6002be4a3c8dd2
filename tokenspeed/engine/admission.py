"""One stay of a request in a worker slot: from admission to the last launched step that names it.

    positions  |<--- computed --->|<--- in flight --->|<--- pages held --->|
               0            num_computed         num_planned            capacity

`num_computed` counts the KV of committed tokens, `num_planned` what launched steps may have written
at most; a commit takes back what was not accepted, so without steps in flight they are equal. A
preempted request leaves its stay and later begins another one.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

from tokenspeed.batch import Row, SlotStart
from tokenspeed.engine.record import Request, State
from tokenspeed.kv.manager import Holding


@dataclass(slots=True, eq=False)
class Admission:
    """`generation` is unique among all stays: a result that carries it can be nobody else's.

    `token_ids` are the prompt and the output committed before, all to be prefilled; `limit` is the
    number of positions that may be planned.
    """

    request: Request
    slot: int
    generation: int
    holding: Holding
    token_ids: list[int]
    limit: int
    num_computed: int
    num_planned: int
    num_in_flight: int = 0
    last_step: int = -1
    """The last step in which it had a row."""
    is_running: bool = True
    """False once finished, aborted or preempted: it then only waits for its launched steps."""
    is_decoding: bool = False
    """Whether the last chunk of the prefill was launched: from here on the device knows more."""
    num_sent: list[int] = field(init=False)
    """Pages of each group's table that the worker has been told."""
    _no_pages: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.num_sent = [0] * len(self.holding.tables)
        self._no_pages = [[] for _ in self.holding.tables]

    @property
    def num_to_prefill(self) -> int:
        """Known tokens that no step has been launched for."""
        return 0 if self.is_decoding else len(self.token_ids) - self.num_planned

    @property
    def can_decode(self) -> bool:
        """Whether a decode row may be launched: False too while steps in flight may bring all that
        is missing.
        """
        return self.is_decoding and self.num_planned < self.limit

    def start(self) -> SlotStart:
        spec = self.request.spec
        return SlotStart(
            slot=self.slot,
            generation=self.generation,
            token_ids=self.token_ids,
            num_prompt=self.request.num_prompt,
            params=spec.params,
            seed=spec.seed,
            sample_index=spec.sample_index,
        )

    def launch_row(self, step: int, num_tokens: int) -> Row:
        """The next `num_tokens` as a row of a step that is about to be launched."""
        decode = self.is_decoding
        self.is_decoding = num_tokens >= self.num_to_prefill
        page_starts, pages = self._pages_to_tell()
        row = Row(
            slot=self.slot,
            generation=self.generation,
            start=self.num_planned,
            num_tokens=num_tokens,
            decode=decode,
            sample=self.is_decoding and self.request.max_tokens > 0,
            page_starts=page_starts,
            pages=pages,
        )
        self.num_planned += num_tokens
        self.num_in_flight += 1
        self.last_step = step
        return row

    def _pages_to_tell(self) -> tuple[list[int], list[list[int]]]:
        """What has been added to the page tables since the last row. The lists are shared between
        rows where that is nothing: most decode rows, hence thousands of objects a second.
        """
        starts, tables = self.num_sent, self.holding.tables
        if all(map(operator.eq, map(len, tables), starts)):
            return starts, self._no_pages
        self.num_sent = [len(table) for table in tables]
        return starts, [table[start:] for start, table in zip(starts, tables, strict=True)]

    def land_row(self, row: Row, num_accepted: int, num_kept: int) -> None:
        """A row's step has ended; `num_kept` of the `num_accepted` tokens were committed.

        A prefill row computes exactly its tokens; but the input of a sampled token counts only with
        the token that came of it: if none was accepted, the next row repeats that position.
        """
        num_open = row.num_tokens if row.decode else int(row.sample)
        assert num_kept <= num_accepted <= num_open, f"{num_accepted} tokens from {num_open}"
        self.num_computed += row.num_tokens - num_open + num_kept
        self.num_planned -= num_open - num_accepted

    def check(self, block_size: int) -> None:
        """Prove the invariants of lengths."""
        request = self.request
        assert self.num_planned <= len(self.holding.tables[0]) * block_size, "planned without pages"
        assert self.num_in_flight or self.num_computed == self.num_planned, "a bound was not undone"
        if request.state is State.DECODING:
            assert self.num_computed == request.num_tokens - 1, "a lost token"
