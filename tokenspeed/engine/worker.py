"""A batch to sampled ids: runs the model for a step and keeps the slots' device state.

    step = worker.launch(batch)   enqueue the forward: embed, layers, head of the rows that need it
    step.sample(masks)            enqueue the second phase: sampling, and the slots' new tokens
    step.result()                 wait, and bring ids and log-probabilities to the host

A launch changes no length, and a second phase that raises takes back what it appended, so either
can be run again. Rows that are not sampled are looked at too: what their last token attended to is
all of their KV, so none of it is NaN if that token's result is not.

Prompt log-probabilities: a row over positions start .. start + n - 1 brings the entries of the
prompt tokens start + 1 .. start + n that exist (position 0 is predicted by nothing). Everything
runs on one thread, under inference mode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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
from tokenspeed.engine.decode_graphs import DecodeGraphs, Executable
from tokenspeed.engine.grammars import unpack
from tokenspeed.engine.logprobs import Scores, score, score_hidden
from tokenspeed.engine.pinned import Fetch, send
from tokenspeed.engine.prefill_graphs import PrefillGraphs, device_step
from tokenspeed.engine.sampler import ERRORS, SamplingPlan, plan_sampling, sample
from tokenspeed.engine.slots import QueryTokens, Slots
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.device_step import DeviceAttention
from tokenspeed.kernels.sample_rows import NOT_FINITE, OK
from tokenspeed.request import TokenLogprob


@runtime_checkable
class HostAttention(SequenceState, Protocol):
    """Attention whose pages the host looks up."""

    def plan(self, step: AttentionStep) -> None: ...


@dataclass(frozen=True)
class _SampledRows:
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


@dataclass(frozen=True)
class Graphs:
    """Recorded steps: of decodes alone, and small ones with prompt tokens."""

    decode: DecodeGraphs
    prefill: PrefillGraphs

    def __len__(self) -> int:
        return len(self.decode.sizes) + len(self.prefill.sizes)


class Worker:
    """Owns the model, its cache and the slots. Knows nothing of queues, page owners or clients."""

    def __init__(
        self,
        executable: Executable,
        attention: HostAttention | DeviceAttention,
        slots: Slots,
        *,
        vocab_size: int,
        eos_ids: frozenset[int],
        graphs: Graphs | None = None,
    ) -> None:
        self._executable = executable
        self._attention = attention
        self.slots = slots
        self._graphs = graphs
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._device = slots.device
        self._plan: tuple[list[SlotStart], SamplingPlan] | None = None

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Step:
        """Apply the batch's slot starts, then run the forward of its rows."""
        for start in batch.starts:
            self.slots.start(start)
        starts = [self.slots.of(row) for row in batch.rows]
        self.slots.append_pages(batch.rows)
        if self._graphs is not None:
            found = self._launch_graph(self._graphs, batch.rows, starts)
            if found is not None:
                return Step(self, batch, starts, *found, [None] * len(starts))
        query = self.slots.inputs(batch.rows)
        self._plan_attention(batch.rows, query)
        last = query.ends - 1
        scored = any(start.params.prompt_logprobs is not None for start in starts)
        with forward_context(self._attention):
            x = self._executable.embed(query.ids)
            rows = None if scored or last.shape == query.ids.shape else last
            hidden = self._executable.forward(x, query.positions, rows)
        prompt_scores: list[Scores | None] = [None] * len(starts)
        if scored:
            prompt_scores = [
                self._score_prompt(row, start, hidden[end - row.num_tokens : end])
                for row, start, end in zip(batch.rows, starts, _ends(batch.rows), strict=True)
            ]
            hidden = hidden[last]
        sampled, others = self._sampled_rows(batch.rows, starts, query, hidden)
        return Step(self, batch, starts, sampled, others, prompt_scores)

    def _launch_graph(
        self, graphs: Graphs, rows: list[Row], starts: list[SlotStart]
    ) -> tuple[_SampledRows | None, Tensor | None] | None:
        """The rows that are sampled, and the logits of the others; None: there is no such graph."""
        if all(row.decode for row in rows):
            found = graphs.decode.forward([row.slot for row in rows])
            if found is None:
                return None
            bound = max(row.start for row in rows) + 1
            return _SampledRows(starts, found[2], found[1], bound, found[0], graphs.decode), None
        if any(start.params.prompt_logprobs is not None for start in starts):
            return None
        found = graphs.prefill.forward(rows)
        if found is None:
            return None
        logits, lengths, slots = found
        chosen = [i for i, row in enumerate(rows) if row.sample]
        if not chosen:
            return None, logits
        which = slice(None) if len(chosen) == len(rows) else send(chosen, self._device)
        others = None
        if len(chosen) < len(rows):
            others = logits[send([i for i, row in enumerate(rows) if not row.sample], self._device)]
        sampled = _SampledRows(
            starts=[starts[i] for i in chosen],
            slots=slots[which],
            lengths=lengths[which],
            bound=max(rows[i].start + rows[i].num_tokens for i in chosen),
            logits=logits[which],
        )
        return sampled, others

    def _plan_attention(self, rows: list[Row], query: QueryTokens) -> None:
        contexts, ends = [row.start + row.num_tokens for row in rows], _ends(rows)
        if isinstance(self._attention, HostAttention):
            tables = self.slots.page_tables(rows)
            self._attention.plan(AttentionStep([0, *ends], contexts, tables))
            return
        decodes = sum(1 for _ in itertools.takewhile(lambda row: row.num_tokens == 1, rows))
        host = self._host_step(rows[decodes:])
        step = device_step(query, len(rows), ends[-1], max(contexts), decodes, host)
        self._attention.plan_device(step)

    def _host_step(self, chunks: list[Row]) -> AttentionStep | None:
        """What the host knows of the rows behind the decodes: nothing, if one of them stands where
        only the device can tell.
        """
        if not chunks or any(row.decode for row in chunks):
            return None
        contexts = [row.start + row.num_tokens for row in chunks]
        return AttentionStep([0, *_ends(chunks)], contexts, self.slots.page_tables(chunks))

    def check_device(self) -> None:
        """Raise if the device does not even add: after a CUDA error that stays, nothing works until
        the process ends.
        """
        (torch.ones(1, device=self._device) + 1).item()

    def _sampled_rows(
        self, rows: list[Row], starts: list[SlotStart], query: QueryTokens, hidden: Tensor
    ) -> tuple[_SampledRows | None, Tensor | None]:
        """The sampled rows, and the hidden states of the others: `hidden` [R, H] are those of each
        row's last query token.
        """
        chosen = [i for i, row in enumerate(rows) if row.sample]
        which: slice | Tensor = slice(None)
        others: Tensor | None = None
        if len(chosen) < len(rows):
            others = hidden[send([i for i, row in enumerate(rows) if not row.sample], self._device)]
            if not chosen:
                return None, others
            which = send(chosen, self._device)
        sampled = _SampledRows(
            starts=[starts[i] for i in chosen],
            slots=query.slots[which],
            lengths=query.lengths[which],
            bound=max(rows[i].start + rows[i].num_tokens for i in chosen),
            logits=self._executable.head(hidden[which]),
        )
        return sampled, others

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
        others: Tensor | None,
        prompt_scores: list[Scores | None],
    ) -> None:
        """`others` are the model's results at the last token of each row that is not sampled."""
        self.batch = batch
        self._worker = worker
        self._starts = starts
        self._rows = rows
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
            self._worker.slots.retract(rows.slots, rows.lengths)
            raise

    def _sample(self, rows: _SampledRows, masks: Tensor | None) -> None:
        plan = self._worker.sampling_plan(rows.starts)
        if rows.graphs is not None and plan.edits is None and masks is None:
            sampled = rows.graphs.sample(plan)
        else:
            slots = self._worker.slots
            tokens = slots.tokens[:, : rows.bound]
            allowed = None if masks is None else unpack(masks, rows.logits)
            sampled = sample(rows.logits, plan, tokens, rows.lengths, allowed)
            slots.extend(rows.slots, rows.lengths, sampled.ids, sampled.status == OK)
        asked = [i for i, start in enumerate(rows.starts) if start.params.logprobs is not None]
        if asked:
            with_top = any(rows.starts[i].params.logprobs for i in asked)
            which = send(asked, rows.logits.device)
            self._scores = _fetch(score(rows.logits[which], sampled.ids[which], with_top))
        self._sampled = Fetch(sampled.ids, sampled.status)

    def result(self) -> StepResult:
        """Wait for the step, not for those launched behind it; one result a row, in row order."""
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
        if self._rows is None:
            return []
        assert self._sampled is not None, "result() before sample()"
        starts = self._rows.starts
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
                result = _failed(result, ERRORS[status])
            results.append(result)
        return results


def _fetch(scores: Scores) -> Fetch:
    return Fetch(scores.ids, scores.chosen, scores.top_ids, scores.top)


def _ends(rows: list[Row]) -> list[int]:
    """Where each row's query tokens end among the step's."""
    return list(itertools.accumulate(row.num_tokens for row in rows))


def _failed(result: RowResult, error: str) -> RowResult:
    return RowResult(slot=result.slot, generation=result.generation, error=error)


def _with_prompt(result: RowResult, entries: list[TokenLogprob]) -> RowResult:
    if result.error is None and not all(math.isfinite(entry.logprob) for entry in entries):
        return _failed(result, ERRORS[NOT_FINITE])
    return msgspec.structs.replace(result, prompt_logprobs=entries)
