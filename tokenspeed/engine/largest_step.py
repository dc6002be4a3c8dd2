"""The steps that take the most memory: all tokens that a step may have, all rows, and everything
that a request may ask for.

They run in slots of which no request knows. Nothing needs pages: tables name one that is nobody's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.batch import Batch, Row, SlotStart
from tokenspeed.engine.worker import Worker
from tokenspeed.request import MAX_LOGPROBS, SamplingParams
from tokenspeed.structured.orders import num_words


def greediest(vocab_size: int) -> SamplingParams:
    """Every kind of edit, and all log-probabilities."""
    last = vocab_size - 1
    return SamplingParams(
        temperature=0.8,
        top_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=0.5,
        logit_bias={last: 1.0},
        min_tokens=1,
        stop_token_ids=(0,),
        allowed_token_ids=(0, last),
        bad_token_ids=((last, 0),),
        logprobs=MAX_LOGPROBS,
        prompt_logprobs=MAX_LOGPROBS,
    )


def row_lengths(max_rows: int, token_budget: int, max_len: int) -> list[int]:
    """Query tokens by row: one or more for each row, and as many as may be for the last ones. A
    row's next token has a place in its sequence too.
    """
    counts = [1] * min(max_rows, token_budget)
    left = token_budget - len(counts)
    for i in reversed(range(len(counts))):
        more = min(left, max(0, max_len - 1 - counts[i]))
        counts[i] += more
        left -= more
    return counts


def run_largest(worker: Worker, *, max_rows: int, token_budget: int, vocab_size: int) -> None:
    """Enqueue a step of single tokens and, while it is open as with overlap, the largest. The first
    row stands at the end of the longest sequence, so that penalties count all of that.
    """
    max_len, num_groups = worker.slots.max_len, len(worker.slots.tables)
    params = greediest(vocab_size)
    open_steps = []
    for budget in (min(max_rows, token_budget), token_budget):
        counts = row_lengths(max_rows, budget, max_len)
        past = [max(0, max_len - 1 - counts[0]), *([0] * (len(counts) - 1))]
        starts = [
            _start(slot, begin + count, vocab_size, params)
            for slot, (begin, count) in enumerate(zip(past, counts, strict=True))
        ]
        rows = [
            _row(slot, begin, count, num_groups, sample=begin + count < max_len)
            for slot, (begin, count) in enumerate(zip(past, counts, strict=True))
        ]
        step = worker.launch(Batch(step=0, rows=rows, starts=starts))
        step.sample(_all_allowed(sum(row.sample for row in rows), vocab_size, worker.slots.device))
        open_steps.append(step)


def _start(slot: int, length: int, vocab_size: int, params: SamplingParams) -> SlotStart:
    ids = [i % vocab_size for i in range(length)]
    return SlotStart(
        slot=slot,
        generation=0,
        token_ids=ids,
        num_prompt=length,
        params=params,
        seed=slot,
        sample_index=0,
    )


def _row(slot: int, begin: int, count: int, num_groups: int, *, sample: bool) -> Row:
    return Row(
        slot=slot,
        generation=0,
        start=begin,
        num_tokens=count,
        decode=False,
        sample=sample,
        page_starts=[0] * num_groups,
        pages=[[] for _ in range(num_groups)],
    )


def _all_allowed(num_rows: int, vocab_size: int, device: torch.device) -> Tensor:
    """Packed masks, as a grammar's."""
    shape = num_rows, num_words(vocab_size)
    return torch.full(shape, -1, dtype=torch.int32, pin_memory=device.type == "cuda")
