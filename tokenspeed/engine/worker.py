"""A batch to sampled ids: runs the model for a step and keeps the slots' device state.

    step = worker.launch(batch)   enqueue the forward: embed, layers, head of the rows that need it
    step.sample(masks)            enqueue the second phase: sampling, and the slots' new tokens
    step.result()                 wait, and bring ids and log-probabilities to the host

A launch changes no length, so a step that raised before its second phase can be run again. Prompt
log-probabilities: a row over positions start .. start + n - 1 brings the entries of the prompt
tokens start + 1 .. start + n that exist (position 0 is predicted by nothing). Everything runs on
one thread, under inference mode.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from tokenspeed.batch import (
    Batch,
    Row,
    RowResult,
    SequenceState,
    SlotStart,
    StepResult,
    forward_context,
)
from tokenspeed.engine.logprobs import Scores, score, score_hidden
from tokenspeed.engine.sampler import (
    ERRORS,
    NOT_FINITE,
    OK,
    Sampled,
    SamplingPlan,
    plan_sampling,
    sample,
)
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_torch import AttentionStep
from tokenspeed.request import TokenLogprob


class Executable(Protocol):
    """The model as three functions over the step's T tokens."""

    def embed(self, ids: Tensor) -> Tensor: ...
    def forward(self, x: Tensor, positions: Tensor) -> Tensor: ...
    def head(self, rows: Tensor) -> Tensor: ...


class AttentionBackend(SequenceState, Protocol):
    def plan(self, step: AttentionStep) -> None: ...


@dataclass(frozen=True)
class _SampledRows:
    """The R rows of a step that are sampled, in row order. `lengths` [R]: tokens before the new
    one; `bound` is at least their maximum, known without asking the device.
    """

    starts: list[SlotStart]
    slots: Tensor
    lengths: Tensor
    bound: int
    logits: Tensor


class Worker:
    """Owns the model, its cache and the slots. Knows nothing of queues, page owners or clients."""

    def __init__(
        self,
        executable: Executable,
        attention: AttentionBackend,
        slots: Slots,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
    ) -> None:
        self._executable = executable
        self._attention = attention
        self.slots = slots
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._device = slots.tokens.device
        self._plan: tuple[list[SlotStart], SamplingPlan] | None = None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Apply the batch's slot starts, then run the forward of its rows."""
        for start in batch.starts:
            self.slots.start(start)
        starts = [self.slots.of(row) for row in batch.rows]
        for row in batch.rows:
            assert row.num_tokens == 1 or not row.decode, "a decode row has one query token"
            self.slots.append_pages(row)
        ends = _ends(batch.rows)
        self._attention.plan(
            AttentionStep(
                query_starts=[0, *ends],
                context_lens=[row.start + row.num_tokens for row in batch.rows],
                page_tables=self.slots.page_tables(batch.rows),
            )
        )
        ids, positions = self.slots.inputs(batch.rows)
        with forward_context(self._attention):
            x = self._executable.embed(ids)
            hidden = self._executable.forward(x, positions)
        prompt_scores = [
            self._score_prompt(row, start, hidden[end - row.num_tokens : end])
            for row, start, end in zip(batch.rows, starts, ends, strict=True)
        ]
        sampled = self._sampled_rows(batch.rows, starts, ends, hidden)
        return Step(self, batch, starts, sampled, prompt_scores)

    def check_device(self) -> None:
        """Raise if the device does not even add: after a CUDA error that stays, nothing works until
        the process ends.
        """
        (torch.ones(1, device=self._device) + 1).item()

    def _sampled_rows(
        self, rows: list[Row], starts: list[SlotStart], ends: list[int], hidden: Tensor
    ) -> _SampledRows | None:
        """Only the last query token of each sampled row goes through the head."""
        chosen = [i for i, row in enumerate(rows) if row.sample]
        if not chosen:
            return None
        sampled = [rows[i] for i in chosen]
        last = torch.tensor([ends[i] - 1 for i in chosen], device=self._device)
        counts = torch.tensor([row.num_tokens for row in sampled], device=self._device)
        return _SampledRows(
            starts=[starts[i] for i in chosen],
            slots=torch.tensor([row.slot for row in sampled], device=self._device),
            lengths=self.slots.row_starts(sampled) + counts,
            bound=max(row.start + row.num_tokens for row in sampled),
            logits=self._executable.head(hidden[last]).float(),
        )

    def _score_prompt(self, row: Row, start: SlotStart, hidden: Tensor) -> Scores | None:
        """`hidden` [n, H] are the row's own; nothing is done unless its request asks."""
        count = min(row.start + row.num_tokens, start.num_prompt - 1) - row.start
        if start.params.prompt_logprobs is None or count <= 0:
            return None
        wanted = self.slots.tokens[row.slot, row.start + 1 : row.start + 1 + count].long()
        with_top = start.params.prompt_logprobs > 0
        return score_hidden(self._executable.head, hidden[:count], wanted, with_top)

    def sampling_plan(self, starts: list[SlotStart]) -> SamplingPlan:
        """The plan for these rows; decode steps mostly ask for the same one again."""
        if self._plan is None or self._plan[0] != starts:
            plan = plan_sampling(starts, self._eos_ids, self._vocab_size, self._device)
            self._plan = (starts, plan)
        return self._plan[1]


class Step:
    """A launched step. Its second phase comes before the next launch that continues its rows."""

    def __init__(
        self,
        worker: Worker,
        batch: Batch,
        starts: list[SlotStart],
        rows: _SampledRows | None,
        prompt_scores: list[Scores | None],
    ) -> None:
        self.batch = batch
        self._worker = worker
        self._starts = starts
        self._rows = rows
        self._prompt_scores = prompt_scores
        self._sampled: Sampled | None = None
        self._scores: Scores | None = None

    @torch.inference_mode()
    def sample(self, masks: Tensor | None = None) -> None:
        """Sample the rows that are to be, score them, then append to the slots. `masks` (bool
        [R, V], for the sampled rows in order) is true where a token is allowed.
        """
        rows = self._rows
        if rows is None:
            return
        plan = self._worker.sampling_plan(rows.starts)
        slots = self._worker.slots
        sampled = sample(rows.logits, plan, slots.tokens[:, : rows.bound], rows.lengths, masks)
        asked = [i for i, start in enumerate(rows.starts) if start.params.logprobs is not None]
        if asked:
            with_top = any(rows.starts[i].params.logprobs for i in asked)
            self._scores = score(rows.logits[asked], sampled.ids[asked], with_top)
        slots.extend(rows.slots, rows.lengths, sampled.ids, sampled.status == OK)
        self._sampled = sampled

    def result(self) -> StepResult:
        """Wait for the device; one result a row, in row order."""
        sampled = iter(self._sampled_results())
        results = []
        for row, start, scores in zip(
            self.batch.rows, self._starts, self._prompt_scores, strict=True
        ):
            result = RowResult(slot=row.slot, generation=row.generation)
            if row.sample:
                result = next(sampled)
            if scores is not None:
                counts = [start.params.prompt_logprobs or 0] * len(scores.ids)
                result = _with_prompt(result, scores.entries(counts))
            results.append(result)
        return StepResult(batch=self.batch, rows=results)

    def _sampled_results(self) -> list[RowResult]:
        if self._rows is None:
            return []
        assert self._sampled is not None, "result() before sample()"
        starts = self._rows.starts
        counts = [start.params.logprobs for start in starts if start.params.logprobs is not None]
        entries = iter(self._scores.entries(counts) if self._scores is not None else [])
        results = []
        for start, token, status in zip(
            starts, self._sampled.ids.tolist(), self._sampled.status.tolist(), strict=True
        ):
            logprobs = None if start.params.logprobs is None else [next(entries)]
            result = RowResult(
                slot=start.slot, generation=start.generation, token_ids=[token], logprobs=logprobs
            )
            if status != OK:
                result = _failed(result, ERRORS[status])
            results.append(result)
        return results


def _ends(rows: list[Row]) -> list[int]:
    """Where each row's query tokens end among the step's."""
    return list(itertools.accumulate(row.num_tokens for row in rows))


def _failed(result: RowResult, error: str) -> RowResult:
    return RowResult(slot=result.slot, generation=result.generation, error=error)


def _with_prompt(result: RowResult, entries: list[TokenLogprob]) -> RowResult:
    if result.error is None and not all(math.isfinite(entry.logprob) for entry in entries):
        return _failed(result, ERRORS[NOT_FINITE])
    return msgspec.structs.replace(result, prompt_logprobs=entries)
