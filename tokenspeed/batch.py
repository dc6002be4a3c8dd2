"""One engine step as data, and the context in which its forward pass runs.

`Batch` is the scheduler's whole word to a worker: small, serialisable, without tensors, so that it
can be broadcast to ranks that never schedule. `StepResult` is the worker's answer.
`forward_context` is the only global of the engine: sequence calls (`attend`) read the step's cache
and metadata from it, so that neither is a graph input.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

import msgspec
import torch

from tokenspeed.request import SamplingParams, TokenLogprob


class SlotStart(msgspec.Struct, frozen=True, kw_only=True):
    """A request enters (or, after preemption, re-enters) a worker slot: all that the worker keeps
    about it.
    """

    slot: int
    generation: int
    token_ids: list[int]
    """The prompt and every output token committed so far."""
    num_prompt: int
    params: SamplingParams
    seed: int
    sample_index: int


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One request's share of a step: `num_tokens` query tokens from position `start` on.

    A prefill row names exact positions of known tokens. A decode row (`decode` true) continues
    where the slot's device state stands (next input id and its position): `start` is then the
    planner's upper bound, exact when every step before it has been committed. `sample` is true when
    the last query token's logits are sampled. `pages[g]` are the page ids that cache group g
    appends to the slot's table at index `page_starts[g]` (writing them twice is harmless, so a
    failed step can be run again).
    """

    slot: int
    generation: int
    start: int
    num_tokens: int
    decode: bool
    sample: bool
    page_starts: list[int]
    pages: list[list[int]]


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One step. `starts` are applied before `rows` are run; row order is the order of the result's
    rows.
    """

    step: int
    rows: list[Row]
    starts: list[SlotStart] = []

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)


class RowResult(msgspec.Struct, frozen=True, kw_only=True):
    """What a row brought: 0..k accepted tokens, in order. A row with `error` ends its request and
    no other; `is_refusal`: what was asked is to blame.
    """

    slot: int
    generation: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Entries for the prompt positions that this row's chunk predicted (see `Worker`)."""
    error: str | None = None
    is_refusal: bool = False


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """A step's result carries its batch, so that a commit needs no other memory of what was
    launched.
    """

    batch: Batch
    rows: list[RowResult]


class SequenceState(Protocol):
    """What sequence calls find in the forward context: an attention backend bound to its KV pages
    and this step.
    """

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor: ...


_current: SequenceState | None = None


@contextlib.contextmanager
def forward_context(state: SequenceState) -> Iterator[None]:
    """Make `state` the one that sequence calls see. Nesting is a bug."""
    global _current
    assert _current is None, "forward_context does not nest"
    _current = state
    try:
        yield
    finally:
        _current = None


def current_state() -> SequenceState:
    assert _current is not None, "a sequence call ran outside forward_context"
    return _current
