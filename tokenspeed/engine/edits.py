"""What changes logits before temperature: penalties, bias, and bans of tokens.

Work is done only for the rows that ask for it, and each row by itself. Order: repetition, presence
and frequency penalties, bias, then bans: of all but `allowed_token_ids`, of the last tokens of bad
words, and of ending before `min_tokens`. Repetition counts prompt and output
(positive logits are divided, negative ones multiplied); presence and frequency count output only.

Logits are changed in place, a bounded number of rows at a time: a batch's logits in float32 are
hundreds of megabytes, which would be taken from the KV cache once for each copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.batch import SlotStart
from tokenspeed.engine.bad_words import BadWords, find_bad_words
from tokenspeed.engine.pinned import send
from tokenspeed.request import SamplingParams

_MOST_BYTES = 256 << 20
"""Of what is in use at once to edit rows."""

_TOKEN_BYTES, _PLACE_BYTES = 8, 32
"""For each token of the vocabulary: logits and counts. For each known token: what penalties take.
"""

_MULTIPLE = 16
"""Rows are told apart by addresses that are as aligned as the first one's: Triton compiles a kernel
anew for others.
"""


@dataclass(frozen=True)
class _Penalties:
    """Parameters of the p rows with a penalty, as columns [p, 1]; `rows` and `slots` are [p]."""

    rows: Tensor
    slots: Tensor
    num_prompt: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    counts_output: bool
    """A row has a presence or frequency penalty."""

    def apply(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        ids = tokens[self.slots]
        places = torch.arange(ids.shape[1], device=ids.device)
        known = places < lengths[self.rows, None]
        # Places behind the end repeat the first token. It is changed as often as it stands there,
        # each time from what it was to the same.
        ids = torch.where(known, ids, ids[:, :1]).long()
        counts = self._count(known, places, ids, logits.shape[1]) if self.counts_output else None
        index = ids.add_((self.rows * logits.shape[1])[:, None])
        values = logits.take(index)
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        if counts is not None:
            values -= self.presence * (counts > 0)
            values -= counts.mul_(self.frequency)
        logits.put_(index, values)

    def _count(self, known: Tensor, places: Tensor, ids: Tensor, vocab_size: int) -> Tensor:
        """How often the token of each place stands in the output, float32 [p, L]. Whole numbers add
        up exactly.
        """
        is_output = (known & (places >= self.num_prompt)).float()
        counts = is_output.new_zeros(len(ids), vocab_size)
        return counts.scatter_add_(1, ids, is_output).gather(1, ids)


@dataclass(frozen=True)
class _Entries:
    """Single logits to change: `logits[rows, ids]`. All [m]."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True)
class _Allowed:
    """The p `rows` [p] in which few tokens may be sampled: `ids` [m] in the rows' `places` [m]."""

    rows: Tensor
    places: Tensor
    ids: Tensor

    def apply(self, logits: Tensor) -> None:
        rows = self.rows[self.places]
        kept = logits[rows, self.ids]
        logits.index_fill_(0, self.rows, -math.inf)
        logits[rows, self.ids] = kept


@dataclass(frozen=True)
class LogitEdits:
    """The edits of one step's sampled rows."""

    penalties: _Penalties | None
    bias: _Entries | None
    allowed: _Allowed | None
    bad_words: BadWords | None
    bans: _Entries | None
    """`values` is the number of tokens that a row must have before it may end."""

    def apply(self, logits: Tensor, tokens: Tensor, lengths: Tensor) -> None:
        """Change `logits` [R, V] in place. `tokens` [S, L] are the slots' known tokens, of which
        the first `lengths` [R] count.
        """
        if self.penalties is not None:
            self.penalties.apply(logits, tokens, lengths)
        if self.bias is not None:
            logits[self.bias.rows, self.bias.ids] += self.bias.values
        if self.allowed is not None:
            self.allowed.apply(logits)
        if self.bad_words is not None:
            self.bad_words.apply(logits, tokens, lengths)
        if self.bans is not None:
            rows, ids = self.bans.rows, self.bans.ids
            early = lengths[rows] < self.bans.values
            logits[rows, ids] = torch.where(early, -math.inf, logits[rows, ids])


def rows_edited_together(vocab_size: int, max_len: int) -> int:
    """How many rows may be edited together, each of a request of at most `max_len` tokens."""
    row_bytes = _TOKEN_BYTES * vocab_size + _PLACE_BYTES * max_len
    return max(_MULTIPLE, _MOST_BYTES // row_bytes // _MULTIPLE * _MULTIPLE)


def make_edits(
    starts: Sequence[SlotStart], eos_ids: frozenset[int], device: torch.device
) -> LogitEdits | None:
    """The edits of sampled rows, in row order, or None if no row asks for any."""
    edits = LogitEdits(
        penalties=_penalties(starts, device),
        bias=_bias(starts, device),
        allowed=_allowed(starts, device),
        bad_words=find_bad_words(starts, device),
        bans=_bans(starts, eos_ids, device),
    )
    return None if edits == _NO_EDITS else edits


_NO_EDITS = LogitEdits(penalties=None, bias=None, allowed=None, bad_words=None, bans=None)


def _is_penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0
        or params.presence_penalty != 0.0
        or params.frequency_penalty != 0.0
    )


def _penalties(starts: Sequence[SlotStart], device: torch.device) -> _Penalties | None:
    rows = [i for i, start in enumerate(starts) if _is_penalised(start.params)]
    if not rows:
        return None
    asked = [starts[i] for i in rows]
    params = [start.params for start in asked]

    def column(values: list[float]) -> Tensor:
        return send(values, device, torch.float32)[:, None]

    return _Penalties(
        rows=send(rows, device),
        slots=send([start.slot for start in asked], device),
        num_prompt=send([[start.num_prompt] for start in asked], device),
        repetition=column([each.repetition_penalty for each in params]),
        presence=column([each.presence_penalty for each in params]),
        frequency=column([each.frequency_penalty for each in params]),
        counts_output=any(each.presence_penalty or each.frequency_penalty for each in params),
    )


def _bias(starts: Sequence[SlotStart], device: torch.device) -> _Entries | None:
    found = [
        (i, token, bias)
        for i, start in enumerate(starts)
        for token, bias in start.params.logit_bias.items()
    ]
    return _entries(found, torch.float32, device)


def _allowed(starts: Sequence[SlotStart], device: torch.device) -> _Allowed | None:
    asked = [(i, start.params.allowed_token_ids) for i, start in enumerate(starts)]
    rows = [(i, ids) for i, ids in asked if ids is not None]
    if not rows:
        return None
    return _Allowed(
        rows=send([i for i, _ in rows], device),
        places=send([place for place, (_, ids) in enumerate(rows) for _ in ids], device),
        ids=send([token for _, ids in rows for token in ids], device),
    )


def _bans(
    starts: Sequence[SlotStart], eos_ids: frozenset[int], device: torch.device
) -> _Entries | None:
    found = []
    for i, start in enumerate(starts):
        if start.params.min_tokens > 0:
            ending = set(start.params.stop_token_ids)
            ending |= set() if start.params.ignore_eos else eos_ids
            until = start.num_prompt + start.params.min_tokens
            found += [(i, token, until) for token in sorted(ending)]
    return _entries(found, torch.int64, device)


def _entries(
    found: Sequence[tuple[int, int, float]], dtype: torch.dtype, device: torch.device
) -> _Entries | None:
    if not found:
        return None
    rows, ids, values = zip(*found, strict=True)
    return _Entries(
        rows=send(rows, device),
        ids=send(ids, device),
        values=send(values, device, dtype),
    )
