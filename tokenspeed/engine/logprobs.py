"""Log-probabilities of chosen and likeliest tokens, from raw logits, without a full sort.

They are those of the model's distribution: before temperature, penalties, bias and masks. Logits
are made, or copied, for a bounded number of rows at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.score_rows import score_rows
from tokenspeed.request import TokenLogprob

_MOST_ROWS, _MULTIPLE = 256, 16
_MOST_BYTES = 128 << 20
"""Of the logits that exist at once, in float32."""


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


def rows_scored_together(vocab_size: int) -> int:
    """How many rows are scored together: 208 of a vocabulary of 152,000."""
    rows = _MOST_BYTES // (4 * vocab_size) // _MULTIPLE * _MULTIPLE
    return min(_MOST_ROWS, max(_MULTIPLE, rows))


def score_in_chunks(
    logits_of: Callable[[Tensor], Tensor],
    rows: Tensor,
    ids: Tensor,
    with_top: bool,
    vocab_size: int,
) -> Scores:
    """Score `ids` [N] under the logits of `rows` (of N hidden states, or N indices), which
    `logits_of` makes: [n, V] of any floating dtype for n of them.
    """
    size = rows_scored_together(vocab_size)
    chunks = [
        score_rows(logits_of(some), wanted, with_top)
        for some, wanted in zip(torch.split(rows, size), torch.split(ids, size), strict=True)
    ]
    return Scores(ids, *(torch.cat(parts) for parts in zip(*chunks, strict=True)))
