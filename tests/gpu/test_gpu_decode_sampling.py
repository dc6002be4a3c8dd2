"""Sampling inside the worker on a GPU: recorded as it is launched, and compiled before it is asked
for. The model is a table of logits.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sampling_cases import KINDS, draw_rows, launch
from test_decode_graphs import SCRATCH_PAGE, DeviceSteps
from test_worker import begin, decode, prefill, step
from torch import Tensor

from tokenspeed import ledger
from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.prefill_graphs import PrefillGraphs
from tokenspeed.engine.sampler import compile_kernels
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs, Worker
from tokenspeed.kernels.score_rows import score_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
VOCAB = 20000


class Table:
    """The next token's logits by the last token and its position."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self._logits = 2 * torch.randn(97, VOCAB, dtype=torch.bfloat16, device=CUDA)

    def embed(self, ids: Tensor) -> Tensor:
        return ids[:, None].float()

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        hidden = torch.cat([x, positions[:, None].float()], dim=1)
        return hidden if rows is None else hidden[rows]

    def head(self, rows: Tensor) -> Tensor:
        return self._logits[(5 * rows[:, 0] + rows[:, 1]).long() % 97]


def make_worker(*sizes: int) -> Worker:
    model, attention = Table(), DeviceSteps()
    slots = Slots(8, 600, 2, 16, CUDA, scratch_page=SCRATCH_PAGE)
    graphs = None
    if sizes:
        pool = GraphPool(CUDA)
        decodes = DecodeGraphs(model, attention, slots, sizes, pool)
        for size in sorted(sizes, reverse=True):
            decodes.record(size)
        graphs = Graphs(decodes, PrefillGraphs(model, attention, slots, pool))
    return Worker(model, attention, slots, vocab_size=VOCAB, eos_ids=frozenset({1}), graphs=graphs)


def test_recorded_steps_give_what_launched_ones_give() -> None:
    """Greedy rows, random ones, and steps with penalties, which are launched in any case."""
    asked: list[dict[str, Any]] = [*KINDS[:7], {"temperature": 1.0, "presence_penalty": 1.0}]
    asked[3] = {**asked[3], "logprobs": 3}
    plain, recorded = make_worker(), make_worker(1, 2, 4, 8)
    for worker in (plain, recorded):
        for slot, params in enumerate(asked):
            starts = (begin(slot, [slot + 3, 2 * slot, 7], **params),)
            step(worker, prefill(slot, 0, 3, sample=True), starts=starts)
    places = [3] * len(asked)
    batches = ([0, 1], [0], [3, 2, 6], [5, 4, 3, 2, 1, 0], [7, 1], [4], [6, 2, 0, 5, 1])
    for rows in batches * 3:
        batch = [decode(slot, places[slot]) for slot in rows]
        assert step(plain, *batch) == step(recorded, *batch)
        for slot in rows:
            places[slot] += 1
    assert torch.equal(plain.slots.lengths, recorded.slots.lengths)
    assert torch.equal(plain.slots.tokens, recorded.slots.tokens)


@pytest.mark.parametrize("vocab_size", [151936, 50257])
def test_nothing_is_compiled_once_a_start_has_compiled_it(vocab_size: int) -> None:
    compile_kernels(vocab_size, torch.bfloat16, CUDA)
    with ledger.serving(lambda: "a step", forbid=True):
        for count in (1, 2, 3, 5, 8, 33):
            rows = draw_rows(count, vocab_size, dtype=torch.bfloat16, device=CUDA)
            ids, _ = launch(rows)
            launch(rows._replace(logits=rows.logits.float()), bans=True)
            for with_top in (False, True):
                score_rows(rows.logits, ids, with_top)
