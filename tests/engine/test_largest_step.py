"""The largest steps are as large as a step may be, and ask for everything there is."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_worker import VOCAB, Arithmetic, NoAttention

from tokenspeed.batch import Batch
from tokenspeed.engine.edits import LogitEdits
from tokenspeed.engine.largest_step import greediest, row_lengths, run_largest
from tokenspeed.engine.sampler import plan_sampling
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.step import Step
from tokenspeed.engine.worker import Worker


def test_the_greediest_request_asks_for_every_edit() -> None:
    """An edit that is new has to be tried out too."""
    (start, *_) = noted(4, 8, 40)[-1].starts
    (found,) = plan_sampling([start], frozenset(), VOCAB, 40, torch.device("cpu")).edits
    assert found is not None and found.penalties is not None and found.penalties.counts_output
    fields = [each.name for each in dataclasses.fields(LogitEdits)]
    assert [name for name in fields if getattr(found, name) is None] == []
    params = greediest(VOCAB)
    params.check_vocabulary(VOCAB)
    assert params.logprobs == params.prompt_logprobs == 20 and not params.is_greedy


@given(st.integers(1, 300), st.integers(1, 3000), st.integers(1, 500))
def test_rows_have_all_tokens_that_fit(max_rows: int, budget: int, max_len: int) -> None:
    counts = row_lengths(max_rows, budget, max_len)
    assert len(counts) == min(max_rows, budget) and min(counts) >= 1
    assert sum(counts) == max(len(counts), min(budget, len(counts) * (max_len - 1)))
    assert max(counts) <= max(1, max_len - 1)


def noted(max_rows: int, budget: int, max_len: int) -> list[Batch]:
    """Run them on a model of arithmetic; the batches."""
    slots = Slots(max_rows, max_len, num_groups=2, block_size=4, device=torch.device("cpu"))
    worker = Worker(Arithmetic(), NoAttention(), slots, vocab_size=VOCAB, eos_ids=frozenset())
    steps: list[Step] = []
    launch = worker.launch

    def heard(batch: Batch) -> Step:
        steps.append(launch(batch))
        return steps[-1]

    worker.launch = heard  # type: ignore[method-assign]
    run_largest(worker, max_rows=max_rows, token_budget=budget, vocab_size=VOCAB)
    results = [step.result() for step in steps]
    assert all(
        row.logprobs or not each.sample
        for result in results
        for row, each in zip(result.rows, result.batch.rows, strict=True)
    )
    assert all(row.error is None for result in results for row in result.rows)
    scored = [len(row.prompt_logprobs or ()) for row in results[-1].rows]
    assert sum(scored[1:]) == sum(max(0, row.num_tokens - 1) for row in results[-1].batch.rows[1:])
    return [step.batch for step in steps]


@pytest.mark.parametrize(
    ("rows", "budget", "max_len"), [(4, 100, 600), (3, 8, 5), (6, 4, 20), (1, 9, 30), (2, 2, 2)]
)
def test_all_rows_and_tokens_are_launched(rows: int, budget: int, max_len: int) -> None:
    small, large = noted(rows, budget, max_len)
    assert small.num_tokens == len(small.rows) == min(rows, budget)
    assert [row.num_tokens for row in large.rows] == row_lengths(rows, budget, max_len)
    assert all(row.sample for row in large.rows)
    ends = [row.start + row.num_tokens for row in large.rows]
    assert ends[0] == max_len - 1, "penalties count all that a request may have"
    lengths = [len(start.token_ids) for start in large.starts]
    assert lengths == ends


def test_a_context_of_one_token_samples_nothing() -> None:
    assert not any(row.sample for batch in noted(2, 2, 1) for row in batch.rows)
