"""Decode steps by recordings: the same as steps launched row by row, at every size."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from engine_tiny import tiny_engine
from test_worker import BLOCK, VOCAB, Arithmetic, after, begin, decode, prefill, step, tokens
from torch import Tensor

from tokenspeed.batch import Batch
from tokenspeed.compile.cudagraph import GraphPool, Recording, padded_size
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.prefill_graphs import ROWS, PrefillGraphs
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs, Worker
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.options import ConfigError
from tokenspeed.resolve import graph_sizes

SLOTS, SCRATCH_PAGE = 6, 77


class DeviceSteps:
    """An attention without a head, which keeps what it was told."""

    fuses_prologue = False

    def __init__(self) -> None:
        self.steps: list[DeviceStep] = []

    def plan_device(self, step: DeviceStep, results: Tensor | None = None) -> None:
        self.steps.append(step)

    def room_for_results(self, num_tokens: int) -> Tensor:
        assert num_tokens == 0, "without layers no step is worth pieces"
        return torch.empty(0)

    def attend(self, *arguments: Any) -> Tensor:
        raise AssertionError("the model has no attention")

    attend_fused = attend


def make_worker(*sizes: int, tokens: tuple[int, ...] = ()) -> tuple[Worker, DeviceSteps]:
    model, attention = Arithmetic(), DeviceSteps()
    slots = Slots(SLOTS, 600, 2, BLOCK, torch.device("cpu"), scratch_page=SCRATCH_PAGE)
    graphs = None
    if sizes:
        pool = GraphPool(slots.device)
        decode = DecodeGraphs(model, attention, slots, sizes, pool)
        prefill = PrefillGraphs(model, attention, slots, pool)
        graphs = Graphs(decode, prefill)
        for size in sorted(sizes, reverse=True):
            decode.record(size)
        for size in tokens:
            prefill.record(size)
    worker = Worker(
        model, attention, slots, vocab_size=VOCAB, eos_ids=frozenset({1}), graphs=graphs
    )
    return worker, attention


def prompts(worker: Worker, count: int, **params: Any) -> None:
    for slot in range(count):
        ids = [slot + 3, 2 * slot, 7]
        step(worker, prefill(slot, 0, 3, sample=True), starts=(begin(slot, ids, **params),))


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"logprobs": 2}, {"min_tokens": 9}])
def test_recorded_steps_give_what_launched_ones_give(params: dict[str, Any]) -> None:
    plain, recorded = make_worker()[0], make_worker(1, 2, 4)[0]
    for worker in (plain, recorded):
        prompts(worker, 5, **params)
    # Rows come and go; five are more than any recording holds.
    for position, rows in enumerate([[0], [2, 0], [4, 1, 3], [4, 1, 3], [0, 1, 2, 3, 4], [3]], 3):
        results = [
            step(worker, *(decode(slot, position) for slot in rows)) for worker in (plain, recorded)
        ]
        assert results[0] == results[1]


@pytest.mark.parametrize("what", ["score_in_chunks", "Fetch"])
@pytest.mark.parametrize("sizes", [(), (2,)], ids=["launched", "recorded"])
def test_a_second_phase_that_raises_appends_nothing(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...], what: str
) -> None:
    worker, _ = make_worker(*sizes)
    prompts(worker, 2, logprobs=1)
    rows = decode(0, 3), decode(1, 3)
    launched = worker.launch(Batch(step=0, rows=list(rows)))

    def fail(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    with monkeypatch.context() as patch:
        patch.setattr(f"tokenspeed.engine.step.{what}", fail)
        with pytest.raises(torch.OutOfMemoryError):
            launched.sample()
    fresh = make_worker()[0]
    prompts(fresh, 2, logprobs=1)
    assert step(worker, *rows) == step(fresh, *rows)


def test_recorded_rows_are_sampled_as_each_asks() -> None:
    """Parameters move with their rows, and leave none behind."""
    asked: list[dict[str, Any]] = [
        {},
        {"temperature": 0.9},
        {"temperature": 2.0, "top_k": 5},
        {"temperature": 2.0, "top_p": 0.6, "logprobs": 1},
        {"temperature": 1.5, "min_p": 0.1, "repetition_penalty": 1.3},
    ]
    plain, recorded = make_worker()[0], make_worker(1, 2, 4)[0]
    for worker in (plain, recorded):
        for slot, params in enumerate(asked):
            ids = [slot + 3, 2 * slot, 7]
            starts = (begin(slot, ids, **params),)
            step(worker, prefill(slot, 0, 3, sample=True), starts=starts)
    places = [3] * len(asked)
    for rows in ([0, 1], [3, 2], [2, 3], [0], [1, 2, 3], [2, 1, 3, 0], [4, 1], [2]) * 2:
        batch = [decode(slot, places[slot]) for slot in rows]
        assert step(plain, *batch) == step(recorded, *batch)
        for slot in rows:
            places[slot] += 1


def test_the_next_input_is_the_one_on_the_device() -> None:
    """Two steps in flight: the second is launched before anybody saw the first's tokens."""
    worker, _ = make_worker(2)
    prompts(worker, 1)
    launched = []
    for position in (3, 4):
        launched.append(worker.launch(Batch(step=0, rows=[decode(0, position)])))
        launched[-1].sample()
    found = [tokens(each.result())[0][0] for each in launched]
    first = after(after(7, 2), 3)
    assert found == [first, after(first, 4)]


def test_rows_left_over_stand_in_scratch() -> None:
    worker, attention = make_worker(4)
    prompts(worker, 2)
    step(worker, decode(1, 3))
    planned = attention.steps[-1]
    assert planned.num_rows == 4 and planned.max_query_len == 1
    assert planned.slots.tolist() == [1, SLOTS, SLOTS, SLOTS]
    assert planned.context_lens.tolist() == [4, 1, 1, 1]
    assert worker.slots.lengths[SLOTS] == 1
    tables = worker.slots.device_tables
    assert all((table[SLOTS] == SCRATCH_PAGE).all() for table in tables)


def test_a_step_brings_what_the_host_knows_of_its_chunks() -> None:
    worker, attention = make_worker(4)
    prompts(worker, 2)
    rows = [
        decode(0, 3),
        prefill(2, 0, 5, sample=False, page_starts=[0, 0], pages=[[5, 9], [6, 3]]),
        prefill(3, 0, 2, sample=True, page_starts=[0, 0], pages=[[8], [1]]),
    ]
    step(worker, *rows, starts=(begin(2, [1] * 9), begin(3, [2, 2])))
    host = attention.steps[-1].host
    assert attention.steps[-1].num_decodes == 1 and host is not None
    assert host.query_starts == [0, 5, 7] and host.context_lens == [5, 2]
    pages = [[table.tolist() for table in group] for group in host.page_tables]
    assert pages == [[[5, 9], [8]], [[6, 3], [1]]]
    step(worker, prefill(2, 5, 4, sample=True), decode(0, 4))
    assert attention.steps[-1].host is None, "a decode stands where the device knows"
    step(worker, decode(0, 5))
    assert attention.steps[-1].host is None


def test_device_tables_follow_the_pages_of_rows() -> None:
    worker, _ = make_worker()
    row = prefill(2, 0, 5, sample=True, page_starts=[0, 0], pages=[[5, 9], [6, 3]])
    step(worker, row, starts=(begin(2, [1] * 5),))
    more = prefill(2, 5, 4, sample=False, page_starts=[2, 2], pages=[[8], [1]])
    worker.slots.append_pages([more])
    assert [table[2, :3].tolist() for table in worker.slots.device_tables] == [
        [5, 9, 8],
        [6, 3, 1],
    ]


def test_sizes_ascend_and_end_with_the_largest() -> None:
    for largest in (1, 2, 3, 7, 64, 100, 256, 512):
        sizes = graph_sizes(largest)
        assert list(sizes) == sorted(set(sizes)) and sizes[-1] == largest and sizes[0] == 1
    assert padded_size((1, 2, 4), 3) == 4 and padded_size((1, 2, 4), 5) is None
    waste = max(padded_size(graph_sizes(512), n) - n for n in range(1, 513))  # type: ignore[operator]
    assert waste < 32


def test_a_replay_runs_again_into_the_same_tensors() -> None:
    x = torch.ones(3)
    recording = Recording(lambda: (x * 2,), GraphPool(torch.device("cpu")))
    (result,) = recording.results
    x.fill_(5)
    recording.replay()
    assert result.tolist() == [10, 10, 10]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.9}, {"prompt_logprobs": 1}])
def test_recorded_chunks_give_what_launched_ones_give(params: dict[str, Any]) -> None:
    """Chunks, decodes beside them, rows that are not sampled; 12 tokens fit no recording."""
    plain, recorded = make_worker()[0], make_worker(2, tokens=(4, 8))[0]
    ids = [5, 6, 7, 8, 9]
    results = []
    for worker in (plain, recorded):
        starts = (begin(0, ids, **params), begin(3, ids[:3], **params))
        found = [step(worker, prefill(0, 0, 3, sample=False), starts=starts)]
        found.append(step(worker, prefill(3, 0, 3, sample=True), prefill(0, 3, 2, sample=True)))
        long = begin(1, ids * 4, **params)
        found.append(step(worker, decode(3, 3), prefill(1, 0, 6, sample=False), starts=(long,)))
        found.append(step(worker, decode(0, 5), decode(3, 4), prefill(1, 6, 10, sample=False)))
        found.append(step(worker, prefill(1, 16, 4, sample=True), decode(0, 6)))
        results.append(found)
    assert results[0] == results[1]


@pytest.mark.parametrize("sizes", [(), (8,)], ids=["launched", "recorded"])
def test_a_chunk_that_is_not_finite_is_an_error(sizes: tuple[int, ...]) -> None:
    worker, _ = make_worker(*(1,) if sizes else (), tokens=sizes)
    worker._executable.broken_token = 9  # type: ignore[attr-defined]
    starts = begin(0, [5, 9, 5, 5]), begin(1, [5, 5, 9]), begin(2, [4, 6, 4])
    rows = [prefill(slot, 0, 2, sample=False) for slot in (0, 1)]
    found = step(worker, *rows, prefill(2, 0, 3, sample=True), starts=starts)
    assert [row.error for row in found.rows] == ["the model produced NaN logits", None, None]
    found = step(worker, prefill(1, 2, 1, sample=True))
    assert [row.error for row in found.rows] == ["the model produced NaN logits"]


def test_tokens_left_over_stand_in_scratch() -> None:
    worker, attention = make_worker(1, tokens=(8,))
    pages = {"page_starts": [0, 0], "pages": [[4], [2]]}
    step(worker, prefill(2, 0, 3, sample=True, **pages), starts=(begin(2, [1, 2, 3]),))
    planned = attention.steps[-1]
    assert planned.num_tokens == 8 and planned.num_rows == ROWS + 1
    assert planned.slots.tolist() == [2] + [SLOTS] * ROWS
    assert planned.query_starts.tolist() == [0, 3] + [8] * ROWS
    assert planned.context_lens.tolist() == [3, 5] + [0] * (ROWS - 1)
    assert planned.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert planned.token_rows.tolist() == [0] * 3 + [1] * 5
    assert worker.slots.lengths[SLOTS] == 1


def test_a_level_that_cannot_be_is_refused(tiny_model: str) -> None:
    with pytest.raises(ConfigError, match="-O2 replays CUDA graphs, and there is no CUDA device"):
        tiny_engine(tiny_model, level=2)


def test_a_step_that_is_sampled_keeps_no_logits() -> None:
    """While it is open, the next step's forward finds their memory free."""
    worker, _ = make_worker()
    batch = Batch(
        step=0,
        rows=[prefill(0, 0, 3, sample=True)],
        starts=[begin(0, [4, 5, 7], repetition_penalty=1.1, logprobs=1)],
    )
    made: list[weakref.ref[Tensor]] = []
    head = worker._executable.head

    def heard(rows: Tensor) -> Tensor:
        logits = head(rows)
        made.append(weakref.ref(logits))
        return logits

    worker._executable.head = heard  # type: ignore[method-assign]
    launched = worker.launch(batch)
    assert made[0]() is not None
    launched.sample()
    assert made[0]() is None
    assert tokens(launched.result())[0]
