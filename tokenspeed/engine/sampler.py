"""From logits to sampled ids, on the device, each row by itself.

    logits -> edits (penalties, bias, bans, masks) -> argmax                         greedy rows
                                                   -> (x - max) / temperature
                                                      -> cuts -> + noise -> argmax   other rows

A row's token never depends on the other rows of its step: every operation works along the row, and
noise is a function of the request and the position (see `noise`). Greedy rows, and ties, take the
lowest id. A row whose logits are not finite, or whose every token is banned, gets a status instead
of a token; its neighbours do not notice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.batch import SlotStart
from tokenspeed.engine.edits import LogitEdits, make_edits
from tokenspeed.engine.noise import gumbel, row_keys
from tokenspeed.engine.pinned import send
from tokenspeed.engine.truncation import Cuts, make_cuts

OK, NOT_FINITE, NO_TOKEN = 0, 1, 2
ERRORS = {
    NOT_FINITE: "the model produced NaN logits",
    NO_TOKEN: "no token may be sampled: bias, min_tokens and masks ban all of them",
}
MIN_TEMPERATURE = 1e-5
"""Lower ones are raised to it: it cannot be told from greedy, and 1e-40 would divide to NaN."""


@dataclass(frozen=True)
class _Random:
    """The r rows that are not greedy: `rows`, `seeds`, `samples` are int64 [r]."""

    rows: Tensor
    temperature: Tensor
    seeds: Tensor
    samples: Tensor
    cuts: Cuts | None


@dataclass(frozen=True)
class SamplingPlan:
    """How the rows of a step are sampled: a function of the requests alone, so it serves every step
    with the same rows.
    """

    edits: LogitEdits | None
    random: _Random | None


@dataclass(frozen=True)
class Sampled:
    """`ids` [R] are valid where `status` [R] is OK. Both int64."""

    ids: Tensor
    status: Tensor


def plan_sampling(
    starts: Sequence[SlotStart], eos_ids: frozenset[int], vocab_size: int, device: torch.device
) -> SamplingPlan:
    """Plan for the sampled rows of a step, in row order. `eos_ids` end a request (for
    `min_tokens`).
    """
    return SamplingPlan(
        edits=make_edits(starts, eos_ids, device), random=_plan_random(starts, vocab_size, device)
    )


def _plan_random(
    starts: Sequence[SlotStart], vocab_size: int, device: torch.device
) -> _Random | None:
    rows = [i for i, start in enumerate(starts) if not start.params.is_greedy]
    if not rows:
        return None
    asked = [starts[i] for i in rows]
    temperatures = [[max(start.params.temperature, MIN_TEMPERATURE)] for start in asked]
    return _Random(
        rows=send(rows, device),
        temperature=send(temperatures, device, torch.float32),
        seeds=send([start.seed for start in asked], device),
        samples=send([start.sample_index for start in asked], device),
        cuts=make_cuts([start.params for start in asked], vocab_size, device),
    )


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    tokens: Tensor,
    lengths: Tensor,
    masks: Tensor | None = None,
) -> Sampled:
    """Sample one token for each row of `logits` (float32 [R, V], left unchanged).

    `lengths` [R] counts the tokens before the sampled one, which is its position; `tokens` [S, L]
    holds at least that many for every slot of the plan. `masks` (bool [R, V]) is true where a
    token is allowed.
    """
    # One sum instead of V tests: a NaN or an infinity in a row survives in the sum.
    is_finite = logits.sum(dim=-1).isfinite()
    if plan.edits is not None:
        logits = logits.clone()
        plan.edits.apply(logits, tokens, lengths)
    if masks is not None:
        logits = logits.masked_fill(~masks, -math.inf)
    best, ids = logits.max(dim=-1)
    if plan.random is not None:
        rows = plan.random.rows
        ids[rows] = _sample_random(logits[rows], plan.random, best[rows], lengths[rows])
    status = torch.where(best == -math.inf, NO_TOKEN, OK)
    return Sampled(ids=ids, status=torch.where(is_finite, status, NOT_FINITE))


def _sample_random(logits: Tensor, random: _Random, best: Tensor, positions: Tensor) -> Tensor:
    scores = (logits - best[:, None]) / random.temperature
    if random.cuts is not None:
        random.cuts.apply(scores)
    keys = row_keys(random.seeds, random.samples, positions)
    return (scores + gumbel(keys, scores.shape[1])).argmax(dim=-1)
