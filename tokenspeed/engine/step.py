"""The second phase of a step, and what came of it: sampling, the slots' new tokens, results."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import msgspec
import torch
from torch import Tensor

from tokenspeed.batch import Batch, RowResult, SlotStart, StepResult
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.logprobs import Scores, score_in_chunks
from tokenspeed.engine.masks import unpack
from tokenspeed.engine.pinned import Fetch, send
from tokenspeed.engine.sampler import ERRORS, SamplingPlan, sample
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.sample_rows import NO_TOKEN, NOT_FINITE, OK
from tokenspeed.request import TokenLogprob


class Sampling(Protocol):
    """What a step needs of the worker that launched it."""

    slots: Slots

    def sampling_plan(self, starts: list[SlotStart]) -> SamplingPlan: ...


@dataclass(frozen=True)
class SampledRows:
    """The R rows of a step that are sampled, in row order. `lengths` [R]: tokens before the new
    one; `bound` is at least their maximum, known without asking the device. `graphs`: they come
    from one of these.
    """

    starts: list[SlotStart]
    slots: Tensor
    lengths: Tensor
    bound: int
    logits: Tensor
    graphs: DecodeGraphs | None = None


class Step:
    """A launched step. Its second phase comes before the next launch that continues its rows."""

    def __init__(
        self,
        sampling: Sampling,
        batch: Batch,
        starts: list[SlotStart],
        rows: SampledRows | None,
        others: Tensor | None,
        prompt_scores: list[Scores | None],
    ) -> None:
        """`others` are the model's results at the last token of each row that is not sampled."""
        self.batch = batch
        self._sampling = sampling
        self._starts = starts
        self._rows = rows
        self._sampled_starts = [] if rows is None else rows.starts
        self._others: Fetch | None = None
        if others is not None:  # as in `sample`, one sum instead of a test of each
            self._others = Fetch(others.sum(dim=-1, dtype=torch.float32).isfinite())
        self._prompt_scores = [None if each is None else _fetch(each) for each in prompt_scores]
        self._scores: Fetch | None = None
        self._sampled: Fetch | None = None

    @torch.inference_mode()
    def sample(self, masks: Tensor | None = None) -> None:
        """Sample the rows that are to be, append to the slots, score. If it raises, nothing is
        appended. `masks`: packed words on the host, int32 [R, ceil(V / 32)], for the sampled rows.
        """
        rows = self._rows
        if rows is None:
            return
        try:
            self._sample(rows, masks)
        except BaseException:
            self._sampling.slots.retract(rows.slots, rows.lengths)
            raise
        self._rows = None  # the next step's forward wants the memory of the logits

    def _sample(self, rows: SampledRows, masks: Tensor | None) -> None:
        plan = self._sampling.sampling_plan(rows.starts)
        if rows.graphs is not None and not plan.edits and masks is None:
            sampled = rows.graphs.sample(plan)
        else:
            slots = self._sampling.slots
            tokens = slots.tokens[:, : rows.bound]
            allowed = None if masks is None else unpack(masks, rows.logits)
            sampled = sample(rows.logits, plan, tokens, rows.lengths, allowed)
            slots.extend(rows.slots, rows.lengths, sampled.ids, sampled.status == OK)
        asked = [i for i, start in enumerate(rows.starts) if start.params.logprobs is not None]
        if asked:
            with_top = any(rows.starts[i].params.logprobs for i in asked)
            which = send(asked, rows.logits.device)
            pick, vocab_size = rows.logits.__getitem__, rows.logits.shape[1]
            self._scores = _fetch(
                score_in_chunks(pick, which, sampled.ids[which], with_top, vocab_size)
            )
        self._sampled = Fetch(sampled.ids, sampled.status)

    def wait(self) -> None:
        """For the step, not for those launched behind it."""
        for fetch in (self._sampled, self._scores, self._others, *self._prompt_scores):
            if fetch is not None:
                fetch.wait()

    def result(self) -> StepResult:
        """Wait for the step if nobody did; one result a row, in row order."""
        sampled = iter(self._sampled_results())
        others = iter(() if self._others is None else self._others.wait()[0].tolist())
        results = []
        for row, start, fetch in zip(
            self.batch.rows, self._starts, self._prompt_scores, strict=True
        ):
            result = RowResult(slot=row.slot, generation=row.generation)
            if row.sample:
                result = next(sampled)
            elif not next(others):
                result = _failed(result, ERRORS[NOT_FINITE])
            if fetch is not None:
                scores = Scores(*fetch.wait())
                counts = [start.params.prompt_logprobs or 0] * len(scores.ids)
                result = _with_prompt(result, scores.entries(counts))
            results.append(result)
        return StepResult(batch=self.batch, rows=results)

    def _sampled_results(self) -> list[RowResult]:
        starts = self._sampled_starts
        if not starts:
            return []
        assert self._sampled is not None, "result() before sample()"
        ids, statuses = self._sampled.wait()
        entries: Iterator[TokenLogprob] = iter(())
        if self._scores is not None:
            asked = [start.params.logprobs for start in starts]
            counts = [count for count in asked if count is not None]
            entries = iter(Scores(*self._scores.wait()).entries(counts))
        results = []
        for start, token, status in zip(starts, ids.tolist(), statuses.tolist(), strict=True):
            logprobs = None if start.params.logprobs is None else [next(entries)]
            result = RowResult(
                slot=start.slot, generation=start.generation, token_ids=[token], logprobs=logprobs
            )
            if status != OK:
                result = _failed(result, ERRORS[status], is_refusal=status == NO_TOKEN)
            results.append(result)
        return results


def _fetch(scores: Scores) -> Fetch:
    return Fetch(scores.ids, scores.chosen, scores.top_ids, scores.top)


def _failed(result: RowResult, error: str, *, is_refusal: bool = False) -> RowResult:
    return RowResult(
        slot=result.slot, generation=result.generation, error=error, is_refusal=is_refusal
    )


def _with_prompt(result: RowResult, entries: list[TokenLogprob]) -> RowResult:
    if result.error is None and not all(math.isfinite(entry.logprob) for entry in entries):
        return _failed(result, ERRORS[NOT_FINITE])
    return msgspec.structs.replace(result, prompt_logprobs=entries)
