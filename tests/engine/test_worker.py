"""The worker over a model of arithmetic: slots, rows in flight, and which rows reach the head."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tokenspeed.batch import Batch, Row, SlotStart, StepResult
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Worker
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.request import SamplingParams

VOCAB, BLOCK = 64, 4


class Arithmetic:
    """After token t at position p comes (5 t + p) mod VOCAB, twice as likely as token 0."""

    layers = SimpleNamespace(steps=[])
    num_weights = 0

    def __init__(self) -> None:
        self.head_rows: list[int] = []
        self.seen: list[tuple[list[int], list[int]]] = []
        self.failing = False
        self.broken_token = -1

    def embed(self, ids: Tensor) -> Tensor:
        return ids[:, None].float()

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        if self.failing:
            raise RuntimeError("not now")
        self.seen.append((x[:, 0].long().tolist(), positions.tolist()))
        x = torch.where(x == self.broken_token, torch.nan, x)
        hidden = torch.cat([x, positions[:, None].float()], dim=1)
        return hidden if rows is None else hidden[rows]

    def head(self, rows: Tensor) -> Tensor:
        self.head_rows.append(len(rows))
        logits = torch.full((len(rows), VOCAB), -20.0)
        logits[:, 0] = 0.0
        best = (rows[:, 0] * 5 + rows[:, 1]).long() % VOCAB
        logits[torch.arange(len(rows)), best] = torch.log(torch.tensor(2.0))
        logits[rows.isnan().any(dim=1)] = torch.nan
        return logits


def after(token: int, position: int) -> int:
    return (5 * token + position) % VOCAB


class NoAttention:
    def __init__(self) -> None:
        self.steps: list[AttentionStep] = []

    def plan(self, step: AttentionStep) -> None:
        self.steps.append(step)

    def attend(self, *arguments: Any) -> Tensor:
        raise AssertionError("the model has no attention")


@pytest.fixture
def model() -> Arithmetic:
    return Arithmetic()


@pytest.fixture
def attention() -> NoAttention:
    return NoAttention()


@pytest.fixture
def worker(model: Arithmetic, attention: NoAttention) -> Worker:
    slots = Slots(4, 600, num_groups=2, block_size=BLOCK, device=torch.device("cpu"))
    return Worker(model, attention, slots, vocab_size=VOCAB, eos_ids=frozenset())


def begin(slot: int, token_ids: list[int], generation: int = 1, **params: Any) -> SlotStart:
    return SlotStart(
        slot=slot,
        generation=generation,
        token_ids=token_ids,
        num_prompt=len(token_ids),
        params=SamplingParams(**{"temperature": 0.0, **params}),
        seed=0,
        sample_index=0,
    )


def prefill(slot: int, first: int, count: int, *, sample: bool, **fields: Any) -> Row:
    values = {"generation": 1, "page_starts": [0, 0], "pages": [[], []]} | fields
    return Row(slot=slot, start=first, num_tokens=count, decode=False, sample=sample, **values)


def decode(slot: int, bound: int, generation: int = 1) -> Row:
    return Row(
        slot=slot,
        generation=generation,
        start=bound,
        num_tokens=1,
        decode=True,
        sample=True,
        page_starts=[0, 0],
        pages=[[], []],
    )


def step(worker: Worker, *rows: Row, starts: tuple[SlotStart, ...] = ()) -> StepResult:
    launched = worker.launch(Batch(step=0, rows=list(rows), starts=list(starts)))
    launched.sample()
    return launched.result()


def tokens(result: StepResult) -> list[list[int]]:
    return [row.token_ids for row in result.rows]


def test_chunks_then_decodes_follow_the_arithmetic(worker: Worker, model: Arithmetic) -> None:
    first = step(worker, prefill(2, 0, 2, sample=False), starts=(begin(2, [9, 8, 7]),))
    assert tokens(first) == [[]] and model.head_rows == []
    found = tokens(step(worker, prefill(2, 2, 1, sample=True)))[0]
    for position in range(3, 6):
        found += tokens(step(worker, decode(2, position)))[0]
    expected = [after(7, 2)]
    for position in range(3, 6):
        expected.append(after(expected[-1], position))
    assert found == expected
    assert model.seen[:2] == [([9, 8], [0, 1]), ([7], [2])]
    assert model.head_rows == [1, 1, 1, 1]


def test_rows_of_all_kinds_in_one_step(
    worker: Worker, model: Arithmetic, attention: NoAttention
) -> None:
    step(worker, prefill(0, 0, 3, sample=True), starts=(begin(0, [1, 2, 3]),))
    rows = [
        prefill(1, 0, 2, sample=False, pages=[[5], [6]]),
        decode(0, 3),
        prefill(3, 0, 5, sample=True, pages=[[8, 2], [3, 4]]),
    ]
    starts = (begin(1, [4, 4, 4]), begin(3, [9, 9, 9, 9, 6]))
    result = step(worker, *rows, starts=starts)
    token = after(3, 2)
    assert tokens(result) == [[], [after(token, 3)], [after(6, 4)]]
    assert model.seen[-1] == ([4, 4, token, 9, 9, 9, 9, 6], [0, 1, 3, 0, 1, 2, 3, 4])
    assert model.head_rows[-1] == 2
    planned = attention.steps[-1]
    assert planned.query_starts == [0, 2, 3, 8] and planned.context_lens == [2, 4, 5]
    pages = [[table.tolist() for table in group] for group in planned.page_tables]
    assert pages == [[[5], [0], [8, 2]], [[6], [0], [3, 4]]]


def test_a_decode_continues_from_the_device_while_results_are_open(worker: Worker) -> None:
    launched = [
        worker.launch(
            Batch(step=0, rows=[prefill(0, 0, 2, sample=True)], starts=[begin(0, [1, 2])])
        )
    ]
    launched[0].sample()
    for number in (1, 2):
        launched.append(worker.launch(Batch(step=number, rows=[decode(0, 1 + number)])))
        launched[-1].sample()
    found = [tokens(each.result())[0][0] for each in launched]
    first = after(2, 1)
    assert found == [first, after(first, 2), after(after(first, 2), 3)]


def test_a_launch_that_raised_can_be_run_again(worker: Worker, model: Arithmetic) -> None:
    start = begin(0, [1, 2])
    batch = Batch(step=0, rows=[prefill(0, 0, 2, sample=True)], starts=[start])
    expected = tokens(step(worker, *batch.rows, starts=(start,)))
    for again in (batch, Batch(step=1, rows=[decode(0, 2)])):
        model.failing = True
        with pytest.raises(RuntimeError):
            worker.launch(again)
        model.failing = False
        expected.append([after(expected[-1][0], 2)])
        assert tokens(step(worker, *again.rows, starts=tuple(again.starts))) == [expected.pop(0)]


def test_a_row_without_a_token_repeats_its_position(worker: Worker, model: Arithmetic) -> None:
    step(worker, prefill(0, 0, 2, sample=True), starts=(begin(0, [1, 2]),))
    launched = worker.launch(Batch(step=1, rows=[decode(0, 2)]))
    launched.sample(masks=torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32))
    (row,) = launched.result().rows
    assert row.error is not None and row.token_ids == []
    step(worker, decode(0, 3))
    assert model.seen[-1] == model.seen[-2] == ([after(2, 1)], [2])


def test_a_slot_changes_hands_while_its_last_step_is_open(worker: Worker) -> None:
    step(worker, prefill(0, 0, 2, sample=True), starts=(begin(0, [1, 2]),))
    stale = worker.launch(Batch(step=1, rows=[decode(0, 2)]))
    stale.sample()
    new = begin(0, [6], generation=2)
    result = step(worker, prefill(0, 0, 1, sample=True, generation=2), starts=(new,))
    assert tokens(result) == [[after(6, 0)]]
    assert stale.result().rows[0].generation == 1
    with pytest.raises(AssertionError, match="does not match its slot"):
        worker.launch(Batch(step=3, rows=[decode(0, 3)]))


def test_prompt_logprobs_come_with_their_chunk_and_in_bounded_pieces(
    worker: Worker, model: Arithmetic
) -> None:
    prompt = [after(i, i) for i in range(520)]
    start = begin(0, prompt, prompt_logprobs=1, logprobs=2)
    first = step(worker, prefill(0, 0, 518, sample=False), starts=(start,)).rows[0]
    last = step(worker, prefill(0, 518, 2, sample=True)).rows[0]
    assert model.head_rows == [256, 256, 6, 1, 1]
    assert first.prompt_logprobs is not None and last.prompt_logprobs is not None
    entries = first.prompt_logprobs + last.prompt_logprobs
    assert [entry.token_id for entry in entries if entry] == prompt[1:]
    for position, entry in enumerate(entries):
        assert entry is not None
        best = after(prompt[position], position)
        assert entry.top[0][0] == best and len(entry.top) == 1
        likely = torch.log(torch.tensor(2 / 3 if best else 1.0)).item()
        assert entry.top[0][1] == pytest.approx(likely, abs=1e-6)
    assert last.logprobs is not None and len(last.logprobs[0].top) == 2
    assert last.logprobs[0].token_id == last.token_ids[0]
