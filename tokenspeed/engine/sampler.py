"""From logits to sampled ids, on the device, each row by itself.

    logits -> edits (penalties, bias, bans), masks -> sample_rows

`plan_sampling` turns the requests of a step into numbers on the device; `kernels.sample_rows` does
the rest for all rows at once, greedy or not, on a GPU in kernels and elsewhere in torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.batch import SlotStart
from tokenspeed.engine.edits import LogitEdits, make_edits, rows_edited_together
from tokenspeed.engine.pinned import send
from tokenspeed.kernels.sample_rows import NO_TOKEN, NOT_FINITE, RowParams, sample_rows
from tokenspeed.kernels.score_rows import score_rows

ERRORS = {
    NOT_FINITE: "the model produced NaN logits",
    NO_TOKEN: "no token may be sampled: together, logit_bias, min_tokens, allowed_token_ids, "
    "bad_words and the form of the output ban all of them; leave one of these out",
}
MIN_TEMPERATURE = 1e-5
"""Lower ones are raised to it: it cannot be told from greedy, and 1e-40 would divide to NaN."""


@dataclass(frozen=True)
class SamplingPlan:
    """How the rows of a step are sampled: a function of the requests alone, so it serves every step
    with the same rows.
    """

    edits: tuple[LogitEdits | None, ...]
    """Of each `rows_at_once` rows; empty if no row asks for any."""
    params: RowParams
    is_greedy: bool
    """All rows are."""
    rows_at_once: int
    """So many rows are copied to be edited."""


@dataclass(frozen=True)
class Sampled:
    """`ids` [R] are valid where `status` [R] is OK. Both int64."""

    ids: Tensor
    status: Tensor


def plan_sampling(
    starts: Sequence[SlotStart],
    eos_ids: frozenset[int],
    vocab_size: int,
    max_len: int,
    device: torch.device,
) -> SamplingPlan:
    """Plan for the sampled rows of a step, in row order. `eos_ids` end a request (for
    `min_tokens`); none has more than `max_len` tokens.
    """
    size = rows_edited_together(vocab_size, max_len)
    edits = tuple(
        make_edits(starts[begin : begin + size], eos_ids, device)
        for begin in range(0, len(starts), size)
    )
    return SamplingPlan(
        edits=edits if any(each is not None for each in edits) else (),
        params=_row_params(starts, vocab_size, device),
        is_greedy=all(start.params.is_greedy for start in starts),
        rows_at_once=size,
    )


def _row_params(starts: Sequence[SlotStart], vocab_size: int, device: torch.device) -> RowParams:
    asked = [start.params for start in starts]

    def heat(temperature: float) -> float:
        return max(temperature, MIN_TEMPERATURE)

    heats = [0.0 if each.is_greedy else heat(each.temperature) for each in asked]
    top_k = [each.top_k if 0 < each.top_k < vocab_size else 0 for each in asked]
    log_min_p = [math.log(each.min_p) if each.min_p > 0.0 else -math.inf for each in asked]
    return RowParams(
        temperature=send(heats, device, torch.float32),
        top_k=send(top_k, device, torch.int32),
        top_p=send([each.top_p for each in asked], device, torch.float32),
        log_min_p=send(log_min_p, device, torch.float32),
        seeds=send([start.seed for start in starts], device),
        samples=send([start.sample_index for start in starts], device),
    )


@torch.inference_mode()
def compile_kernels(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have the kernels that any request may ask for, for logits of `dtype`, before one does."""
    if device.type != "cuda":
        return
    ids = torch.zeros(1, dtype=torch.int64, device=device)
    nothing = torch.zeros(1, device=device)
    params = RowParams(nothing, nothing.int(), nothing + 1, nothing - math.inf, ids, ids)
    for each, bans in ((dtype, False), (torch.float32, True)):
        logits = torch.zeros(1, vocab_size, dtype=each, device=device)
        sample_rows(logits, ids, *params, bans, False)
    for with_top in (False, True):
        score_rows(logits.to(dtype), ids, with_top)


def sample(
    logits: Tensor,
    plan: SamplingPlan,
    tokens: Tensor,
    lengths: Tensor,
    masks: Tensor | None = None,
) -> Sampled:
    """Sample one token for each row of `logits` ([R, V] of any floating dtype, left unchanged).

    `lengths` [R] counts the tokens before the sampled one, which is its position; `tokens` [S, L]
    holds at least that many for every slot of the plan. `masks` (bool [R, V]) is true where a
    token is allowed.
    """
    if not plan.edits and masks is None:
        ids, status = sample_rows(logits, lengths, *plan.params, False, plan.is_greedy)
        return Sampled(ids, status)
    parts: list[tuple[Tensor, Tensor]] = []
    for begin in range(0, len(logits), plan.rows_at_once):
        rows = slice(begin, begin + plan.rows_at_once)
        edits = plan.edits[len(parts)] if plan.edits else None
        part = logits[rows].to(torch.float32, copy=True)
        # Edits may hide a fault. A NaN or an infinity in a row survives in the sum.
        is_finite = part.sum(dim=-1).isfinite()
        if edits is not None:
            edits.apply(part, tokens, lengths[rows])
        if masks is not None:
            part.masked_fill_(~masks[rows], -math.inf)
        params = (each[rows] for each in plan.params)
        ids, status = sample_rows(part, lengths[rows], *params, True, plan.is_greedy)
        parts.append((ids, torch.where(is_finite, status, NOT_FINITE)))
    return Sampled(*(torch.cat(each) for each in zip(*parts, strict=True)))
