"""Token sequences that must not be generated, looked for on the device, where the output is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.batch import SlotStart
from tokenspeed.engine.pinned import send

_ANY = -1


@dataclass(frozen=True)
class BadWords:
    """m sequences, each in one row. `beginnings` [m, P] are all tokens of a sequence but its last,
    at the right, after as many _ANY as it is shorter than others; the rest is [m].
    """

    rows: Tensor
    slots: Tensor
    num_prompt: Tensor
    beginnings: Tensor
    last_ids: Tensor

    def apply(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Ban, in `logits` [R, V], last tokens whose beginnings end the output: `tokens` [S, L], of
        which the first `lengths` [R] count.
        """
        width = self.beginnings.shape[1]
        before = torch.arange(-width, 0, device=tokens.device)
        places = lengths[self.rows, None] + before
        found = tokens[self.slots[:, None], places.clamp(min=0)] == self.beginnings
        found &= places >= self.num_prompt[:, None]
        is_next = (found | (self.beginnings == _ANY)).all(dim=1)
        # Two words may end alike: what one bans, the other must not put back.
        bans = torch.where(is_next, -math.inf, 0.0).to(logits.dtype)
        logits.index_put_((self.rows, self.last_ids), bans, accumulate=True)


def find_bad_words(starts: Sequence[SlotStart], device: torch.device) -> BadWords | None:
    """Those of sampled rows, in row order; None if there are none."""
    found = [
        (i, start, ids) for i, start in enumerate(starts) for ids in start.params.bad_token_ids
    ]
    if not found:
        return None
    width = max(len(ids) for _, _, ids in found) - 1
    beginnings = [[_ANY] * (width + 1 - len(ids)) + list(ids[:-1]) for _, _, ids in found]
    return BadWords(
        rows=send([i for i, _, _ in found], device),
        slots=send([start.slot for _, start, _ in found], device),
        num_prompt=send([start.num_prompt for _, start, _ in found], device),
        beginnings=send(beginnings, device).reshape(len(found), width),
        last_ids=send([ids[-1] for _, _, ids in found], device),
    )
