"""Log-probabilities of chosen and likeliest tokens, from raw logits, without a full sort.

They are those of the model's distribution: before temperature, penalties, bias and masks. For whole
prompts the head is applied to a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.score_rows import score_rows
from tokenspeed.request import TokenLogprob

CHUNK = 256
"""Prompt positions whose logits exist at once: 50 MB in float32 for a vocabulary of 50,000."""


@dataclass(frozen=True)
class Scores:
    """`ids` [N] with their log-probabilities `chosen` [N], and the likeliest tokens, best first:
    `top_ids` and `top` [N, K], with K 0 where nobody asked. `chosen` is not finite where logits
    were not.
    """

    ids: Tensor
    chosen: Tensor
    top_ids: Tensor
    top: Tensor

    def entries(self, counts: Sequence[int]) -> list[TokenLogprob]:
        """On the host, row by row, each with its own number of likeliest tokens."""
        rows = zip(
            counts,
            self.ids.tolist(),
            self.chosen.tolist(),
            self.top_ids.tolist(),
            self.top.tolist(),
            strict=True,
        )
        return [
            TokenLogprob(token, chosen, list(zip(top_ids[:count], top[:count], strict=True)))
            for count, token, chosen, top_ids, top in rows
        ]


def score(logits: Tensor, ids: Tensor, with_top: bool) -> Scores:
    """Score `ids` [N] under `logits` [N, V], of any floating dtype."""
    return Scores(ids, *score_rows(logits, ids, with_top))


def score_hidden(
    head: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor, with_top: bool
) -> Scores:
    """Score `ids` [N] as the tokens that follow the positions of `hidden` [N, H], in chunks."""
    chunks = [
        score(head(rows), wanted, with_top)
        for rows, wanted in zip(torch.split(hidden, CHUNK), torch.split(ids, CHUNK), strict=True)
    ]
    return Scores(
        ids=ids,
        chosen=torch.cat([chunk.chosen for chunk in chunks]),
        top_ids=torch.cat([chunk.top_ids for chunk in chunks]),
        top=torch.cat([chunk.top for chunk in chunks]),
    )
