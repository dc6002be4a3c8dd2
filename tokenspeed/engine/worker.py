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
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from tokenspeed.batch import Batch, Row, SequenceState, SlotStart, forward_context
from tokenspeed.compile.piecewise import PiecewiseForward
from tokenspeed.compile.runner import Executable
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.logprobs import Scores, score_in_chunks
from tokenspeed.engine.piece_graphs import PieceGraphs, run_piecewise
from tokenspeed.engine.pinned import send
from tokenspeed.engine.prefill_graphs import PrefillGraphs, device_step
from tokenspeed.engine.sampler import SamplingPlan, plan_sampling
from tokenspeed.engine.slots import QueryTokens, Slots
from tokenspeed.engine.step import SampledRows, Step
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.device_step import DeviceAttention


@runtime_checkable
class HostAttention(SequenceState, Protocol):
    """Attention whose pages the host looks up."""

    def plan(self, step: AttentionStep) -> None: ...


@dataclass(frozen=True)
class Graphs:
    """Recorded steps: of decodes alone, small ones with prompt tokens, and the pieces of others."""

    decode: DecodeGraphs
    prefill: PrefillGraphs
    pieces: PieceGraphs | None = None

    def __len__(self) -> int:
        return len(self.decode.sizes) + len(self.prefill.sizes) + len(self.pieces or ())

    def pieces_for(self, num_tokens: int) -> PiecewiseForward | None:
        """The graphs between the attentions of a step of so many tokens, if there are any."""
        return None if self.pieces is None else self.pieces.find(num_tokens)


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
        pieces = self._graphs and self._graphs.pieces_for(batch.num_tokens)
        self._plan_attention(batch.rows, query, pieces.results if pieces else None)
        last = query.ends - 1
        scored = any(start.params.prompt_logprobs is not None for start in starts)
        with forward_context(self._attention):
            rows = None if scored or last.shape == query.ids.shape else last
            if pieces:
                hidden = run_piecewise(pieces, query, rows)
            else:
                x = self._executable.embed(query.ids)
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
    ) -> tuple[SampledRows | None, Tensor | None] | None:
        """The rows that are sampled, and the logits of the others; None: there is no such graph."""
        if all(row.decode for row in rows):
            found = graphs.decode.forward([row.slot for row in rows])
            if found is None:
                return None
            bound = max(row.start for row in rows) + 1
            return SampledRows(starts, found[2], found[1], bound, found[0], graphs.decode), None
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
        sampled = SampledRows(
            starts=[starts[i] for i in chosen],
            slots=slots[which],
            lengths=lengths[which],
            bound=max(rows[i].start + rows[i].num_tokens for i in chosen),
            logits=logits[which],
        )
        return sampled, others

    def _plan_attention(self, rows: list[Row], query: QueryTokens, results: Tensor | None) -> None:
        contexts, ends = [row.start + row.num_tokens for row in rows], _ends(rows)
        if isinstance(self._attention, HostAttention):
            tables = self.slots.page_tables(rows)
            self._attention.plan(AttentionStep([0, *ends], contexts, tables))
            return
        decodes = sum(1 for _ in itertools.takewhile(lambda row: row.num_tokens == 1, rows))
        host = self._host_step(rows[decodes:])
        step = device_step(query, len(rows), ends[-1], max(contexts), decodes, host)
        self._attention.plan_device(step, results)

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
    ) -> tuple[SampledRows | None, Tensor | None]:
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
        sampled = SampledRows(
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
        head = self._executable.head
        return score_in_chunks(head, hidden[:count], wanted, with_top, self._vocab_size)

    def sampling_plan(self, starts: list[SlotStart]) -> SamplingPlan:
        """The plan for these rows; decode steps mostly ask for the same one again."""
        if self._plan is None or self._plan[0] != starts:
            sizes = self._vocab_size, self.slots.max_len
            plan = plan_sampling(starts, self._eos_ids, *sizes, self._device)
            self._plan = (starts, plan)
        return self._plan[1]


def _ends(rows: list[Row]) -> list[int]:
    """Where each row's query tokens end among the step's."""
    return list(itertools.accumulate(row.num_tokens for row in rows))
