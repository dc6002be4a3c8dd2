"""Top-k, top-p and min-p in plain torch: take unlikely tokens out of rows of scores.

Each cut is a threshold on the row's own values: tokens that tie with the last one kept are kept
too, so a result depends on no sorting order, and on no other row. The likeliest token always stays.
Shapes: scores [r, V] are logits after temperature, less their maximum; removed tokens become -inf.
"""

from __future__ import annotations

import math

from torch import Tensor

_HEAD = 1024
"""Likeliest tokens that top-p looks at first. A full sort of 50,000 costs eight times as much."""


def cut(scores: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> None:
    """Cut `scores` in place: top-k, then top-p of what is left, then min-p. Work is done only for
    rows that ask for it. The parameters are [r]; 0, 1 and -inf ask for nothing.
    """
    vocab_size = scores.shape[1]
    rows = ((top_k > 0) & (top_k < vocab_size)).nonzero()[:, 0]
    if rows.numel():
        part, k = scores[rows], top_k[rows].long()
        best = part.topk(int(k.max())).values
        scores[rows] = _without(part, best.gather(1, k[:, None] - 1))
    rows = (top_p < 1.0).nonzero()[:, 0]
    if rows.numel():
        scores[rows] = _cut_top_p(scores[rows], top_p[rows, None])
    rows = (log_min_p > -math.inf).nonzero()[:, 0]
    if rows.numel():
        scores[rows] = _without(scores[rows], log_min_p[rows, None])  # the best score is 0


def _without(scores: Tensor, least: Tensor) -> Tensor:
    return scores.masked_fill(scores < least, -math.inf)


def _cut_top_p(scores: Tensor, top_p: Tensor) -> Tensor:
    """Keep a token if the tokens likelier than it have less than `top_p` [r, 1] of the mass.

    Most rows are settled by their likeliest tokens; whether a row is, depends on itself alone.
    """
    probs = scores.softmax(dim=-1)
    head = min(_HEAD, probs.shape[1])
    least, num_kept = _least_kept(probs.topk(head).values, top_p)
    unsettled = (num_kept[:, 0] == head).nonzero()[:, 0]
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
