"""A worker without a model that notices every wrong page, position or length.

The next token is a hash of (seed, all tokens before it). The KV of a position is the hash of the
whole prefix that ends there, so a row that reads a wrong, stale or overwritten page finds a value
it did not expect. A launched step runs at once (as on a device stream) and is handed over later;
meanwhile no other stay may write the pages that it names.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tokenspeed.batch import Batch, Row, RowResult, SlotStart, StepResult
from tokenspeed.request import GenerateRequest, TokenLogprob

VOCAB = 7
EOS = 0
EOS_IDS = frozenset({EOS})
WRONG = -1


def digest(seed: int, tokens: list[int]) -> int:
    text = f"{seed}:{','.join(map(str, tokens))}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def next_token(spec: GenerateRequest, tokens: list[int]) -> int:
    """What the model says behind `tokens`, the prompt among them. Stops wait for min_tokens."""
    params, value = spec.params, digest(spec.seed, tokens)
    banned = set(params.stop_token_ids) | EOS_IDS
    if len(tokens) - len(spec.prompt_ids) >= params.min_tokens:
        banned = set()
    allowed = [token for token in range(VOCAB) if token not in banned] or [VOCAB]
    return allowed[value % len(allowed)]


def run_alone(spec: GenerateRequest, max_tokens: int) -> tuple[list[int], str, int | None]:
    """The oracle: output tokens, finish reason and stop token of `spec` on its own."""
    params = spec.params
    output: list[int] = []
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else EOS_IDS)
    while len(output) < max_tokens:
        token = next_token(spec, spec.prompt_ids + output)
        output.append(token)
        if token in stops:
            return output, "stop", token
    return output, "length", None


@dataclass
class Slot:
    """`tokens[position]` is the next input, as on a device."""

    start: SlotStart
    spec: GenerateRequest
    tokens: list[int]
    tables: list[list[int]]
    is_broken: bool = False

    @property
    def position(self) -> int:
        return len(self.tokens) - 1


@dataclass
class Launched:
    result: StepResult
    pages: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """By generation: (group, page) that its row reads or writes."""


class FakeWorker:
    """`accept(row)` says how many tokens a sampled row brings (at most its query tokens), `fails`
    whether it ends in an error.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_groups: int,
        num_pages: int,
        block_size: int,
        accept: Callable[[Row], int] = lambda row: row.num_tokens if row.decode else 1,
        fails: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self.in_flight: deque[Launched] = deque()
        self._slots: list[Slot | None] = [None] * num_slots
        self._specs: dict[tuple[int, ...], GenerateRequest] = {}
        self._kv: dict[tuple[int, int, int], int] = {}
        self._num_groups = num_groups
        self._num_pages = num_pages
        self._block_size = block_size
        self._accept = accept
        self._fails = fails

    def launch(self, batch: Batch) -> None:
        for start in batch.starts:
            in_use = [launched for launched in self.in_flight if self._names(launched, start.slot)]
            assert not in_use, f"slot {start.slot} is given away under a launched step"
            prompt = start.token_ids[: start.num_prompt]
            spec = GenerateRequest(id="", prompt_ids=prompt, params=start.params, seed=start.seed)
            tables: list[list[int]] = [[] for _ in range(self._num_groups)]
            self._slots[start.slot] = Slot(start, spec, list(start.token_ids), tables)
        assert batch.rows, "an empty batch"
        assert len({row.slot for row in batch.rows}) == len(batch.rows), "two rows of a slot"
        launched = Launched(StepResult(batch=batch, rows=[]))
        self.in_flight.append(launched)
        for row in batch.rows:
            launched.result.rows.append(self._run(row, launched))

    def result(self) -> StepResult:
        return self.in_flight.popleft().result

    def _names(self, launched: Launched, slot: int) -> bool:
        return any(row.slot == slot for row in launched.result.batch.rows)

    def _run(self, row: Row, launched: Launched) -> RowResult:
        slot = self._slots[row.slot]
        assert slot is not None and slot.start.generation == row.generation, "a stale row"
        self._append_pages(slot, row)
        start = slot.position if row.decode else row.start
        is_exact = not any(self._names(other, row.slot) for other in list(self.in_flight)[:-1])
        assert start == row.start if is_exact else start <= row.start, "a wrong start"
        self._claim(slot, row, start, launched)
        slot.is_broken |= self._fails(row)
        if slot.is_broken:
            for position in range(start, start + row.num_tokens):
                self._put(slot, position, WRONG)
            return RowResult(slot=row.slot, generation=row.generation, error="injected")
        end = start + (1 if row.decode else row.num_tokens)
        assert end <= len(slot.tokens), "a row of unknown tokens"
        self._write(slot, start, slot.tokens[:end])
        self._read(slot, end)
        num_known = len(slot.tokens)
        accepted = self._sample(slot, row, end) if row.sample else []
        return RowResult(
            slot=row.slot,
            generation=row.generation,
            token_ids=accepted,
            logprobs=self._logprobs(slot, num_known),
            prompt_logprobs=self._prompt_logprobs(slot, row),
        )

    def _append_pages(self, slot: Slot, row: Row) -> None:
        for table, first, pages in zip(slot.tables, row.page_starts, row.pages, strict=True):
            assert first <= len(table), "a gap in the page table"
            assert all(0 <= page < self._num_pages for page in pages)
            table[first:] = pages if pages else table[first:]

    def _claim(self, slot: Slot, row: Row, start: int, launched: Launched) -> None:
        """The row's pages: none that it writes is named by a launched step of another stay."""
        size = self._block_size
        num_read = -(-(row.start + row.num_tokens) // size)
        for group, table in enumerate(slot.tables):
            assert num_read <= len(table), "the pages do not cover the planned length"
            assert len(set(table)) == len(table), "a page twice in one table"
            launched.pages.setdefault(row.generation, set()).update(
                (group, page) for page in table[:num_read]
            )
            written = {(group, page) for page in table[start // size : num_read]}
            for other in self.in_flight:
                for generation, pages in other.pages.items():
                    assert generation == row.generation or not written & pages, (
                        f"a page of {generation} changed hands under a launched step"
                    )

    def _sample(self, slot: Slot, row: Row, end: int) -> list[int]:
        """Accept some tokens. A decode row's further queries are drafts, at `end` and on: all but
        the last accepted token were drafted right, behind them stands the KV of wrong drafts.
        """
        assert end == len(slot.tokens), "sampled before the last known token"
        num_drafts = row.num_tokens - 1 if row.decode else 0
        num_accepted = self._accept(row)
        assert 0 <= num_accepted <= num_drafts + 1
        accepted: list[int] = []
        for _ in range(num_accepted):
            accepted.append(next_token(slot.spec, slot.tokens + accepted))
        known = slot.tokens + accepted[:-1]
        self._write(slot, end, known)
        for position in range(len(known), end + num_drafts):
            self._put(slot, position, WRONG)
        slot.tokens += accepted
        return accepted

    def _write(self, slot: Slot, start: int, tokens: list[int]) -> None:
        for position in range(start, len(tokens)):
            self._put(slot, position, digest(0, tokens[: position + 1]))

    def _put(self, slot: Slot, position: int, value: int) -> None:
        index, offset = divmod(position, self._block_size)
        for group, table in enumerate(slot.tables):
            self._kv[group, table[index], offset] = value

    def _read(self, slot: Slot, end: int) -> None:
        """Attention over the positions before `end`: each must hold this sequence's KV."""
        for position in range(end):
            index, offset = divmod(position, self._block_size)
            wanted = digest(0, slot.tokens[: position + 1])
            for group, table in enumerate(slot.tables):
                found = self._kv.get((group, table[index], offset))
                assert found == wanted, f"wrong KV at {position} of {end}, page {table[index]}"

    def _logprobs(self, slot: Slot, num_known: int) -> list[TokenLogprob] | None:
        """Minus the token's index, so that a shifted or lost entry shows."""
        if slot.start.params.logprobs is None:
            return None
        places = range(num_known, len(slot.tokens))
        return [TokenLogprob(slot.tokens[i], -float(i)) for i in places]

    def _prompt_logprobs(self, slot: Slot, row: Row) -> list[TokenLogprob | None] | None:
        if row.decode or slot.start.params.prompt_logprobs is None:
            return None
        end = min(row.start + row.num_tokens, slot.start.num_prompt - 1)
        places = range(row.start + 1, end + 1)
        return [TokenLogprob(slot.tokens[i], -float(i)) for i in places]
