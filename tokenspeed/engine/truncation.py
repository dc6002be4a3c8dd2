"""Top-k, top-p and min-p: take unlikely tokens out of rows of scores.

Each cut is a threshold on the row's own values: tokens that tie with the last one kept are kept
too, so a result depends on no sorting order, and on no other row. The likeliest token always stays.
Shapes: scores [r, V] are logits after temperature, less their maximum; removed tokens become -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.engine.pinned import send
from tokenspeed.request import SamplingParams

_HEAD = 1024
"""Likeliest tokens that top-p looks at first. A full sort of 50,000 costs eight times as much."""


@dataclass(frozen=True)
class Cuts:
    """Which rows are cut, and where. `*_rows` index the rows of the scores; None: no row asks."""

    top_k_rows: Tensor | None
    top_k: Tensor
    largest_k: int
    top_p_rows: Tensor | None
    top_p: Tensor
    min_p_rows: Tensor | None
    log_min_p: Tensor

    def apply(self, scores: Tensor) -> None:
        """Cut `scores` [r, V] in place: top-k, then top-p of what is left, then min-p."""
        if self.top_k_rows is not None:
            part = scores[self.top_k_rows]
            best = part.topk(min(self.largest_k, part.shape[1])).values
            scores[self.top_k_rows] = _cut(part, best.gather(1, self.top_k - 1))
        if self.top_p_rows is not None:
            part = scores[self.top_p_rows]
            scores[self.top_p_rows] = _cut_top_p(part, self.top_p)
        if self.min_p_rows is not None:
            part = scores[self.min_p_rows]
            scores[self.min_p_rows] = _cut(part, self.log_min_p)  # the best score is 0


def make_cuts(rows: list[SamplingParams], vocab_size: int, device: torch.device) -> Cuts | None:
    """The cuts of some rows (of scores, in their order), or None if no row asks for any."""
    top_k = [i for i, params in enumerate(rows) if 0 < params.top_k < vocab_size]
    top_p = [i for i, params in enumerate(rows) if params.top_p < 1.0]
    min_p = [i for i, params in enumerate(rows) if params.min_p > 0.0]
    if not (top_k or top_p or min_p):
        return None

    def indices(found: list[int]) -> Tensor | None:
        return send(found, device) if found else None

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return send(values, device, dtype)[:, None]

    return Cuts(
        top_k_rows=indices(top_k),
        top_k=column([rows[i].top_k for i in top_k], torch.int64),
        largest_k=max((rows[i].top_k for i in top_k), default=0),
        top_p_rows=indices(top_p),
        top_p=column([rows[i].top_p for i in top_p], torch.float32),
        min_p_rows=indices(min_p),
        log_min_p=column([math.log(rows[i].min_p) for i in min_p], torch.float32),
    )


def _cut(scores: Tensor, least: Tensor) -> Tensor:
    return scores.masked_fill(scores < least, -math.inf)


def _cut_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep a token if the tokens likelier than it have less than `top_p` [r, 1] of the mass.

    On a CPU most rows are settled by their likeliest tokens; whether a row is, depends on itself
    alone. On a GPU that look at the result would stall the host, and a sort is cheap.
    """
    probs = scores.softmax(dim=-1)
    vocab_size = probs.shape[1]
    if probs.is_cuda or vocab_size <= _HEAD:
        least, _ = _least_kept(probs.sort(dim=-1, descending=True).values, top_p)
        return scores.masked_fill(probs < least, -math.inf)
    least, num_kept = _least_kept(probs.topk(_HEAD).values, top_p)
    unsettled = (num_kept[:, 0] == _HEAD).nonzero()[:, 0]
    if unsettled.numel():
        ordered = probs[unsettled].sort(dim=-1, descending=True).values
        least[unsettled], _ = _least_kept(ordered, top_p[unsettled])
    return scores.masked_fill(probs < least, -math.inf)


def _least_kept(ordered: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest probability kept, and how many of `ordered` [r, n] (descending) are: both
    [r, 1].
    """
    before = ordered.cumsum(dim=-1) - ordered
    num_kept = (before < top_p).sum(dim=-1, keepdim=True)
    last = (num_kept - 1).clamp_(min=0)  # a row of NaN keeps nothing; its error is told elsewhere
    return ordered.gather(1, last), num_kept
