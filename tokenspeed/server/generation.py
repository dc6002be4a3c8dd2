"""All samples of one API request, running in the engine: their text as it comes, and the whole.

Each delta becomes text as it arrives, without a task of its own; whoever consumes takes all that is
ready at once, and the deltas of a sample that came since the last time as one. Leaving the `async
with` block ends what still runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from itertools import chain
from types import TracebackType

import msgspec
from msgspec.structs import replace

from tokenspeed.engine.deltas import joined
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    RequestDelta,
    TokenLogprob,
    job_of,
)
from tokenspeed.server.errors import APIError, bad_request, ended_by_operator
from tokenspeed.server.protocol import PromptTokensDetails, Usage
from tokenspeed.server.state import ServerState
from tokenspeed.text.output import OutputText, Sample, TextDelta
from tokenspeed.text.tokenizer import Tokenizer


class Piece(msgspec.Struct, frozen=True):
    """What one delta added to the sample `index`, as text and as tokens."""

    index: int
    new: TextDelta
    raw: RequestDelta


class UsageCount:
    """Adds up usage: each prompt once (with its first sample's cached tokens), all output.

    `prompt_lens` are the prompts' tokens, `num_samples` the samples of each.
    """

    def __init__(self, prompt_lens: list[int], num_samples: int) -> None:
        self._num_prompt = sum(prompt_lens)
        self._num_samples = num_samples
        self._num_output = 0
        self._cached: dict[int, int] = {}

    def add(self, piece: Piece) -> None:
        self._num_output += len(piece.new.token_ids)
        if piece.raw.num_cached_tokens and piece.index % self._num_samples == 0:
            self._cached[piece.index] = piece.raw.num_cached_tokens

    @property
    def usage(self) -> Usage:
        return Usage(
            self._num_prompt,
            self._num_output,
            self._num_prompt + self._num_output,
            PromptTokensDetails(sum(self._cached.values())),
        )


class Generation:
    """`async with Generation(...) as generation:` runs its requests; `requests[i]` is sample i.
    `kept_ids` are special tokens that their texts show.
    """

    def __init__(
        self,
        state: ServerState,
        tokenizer: Tokenizer | None,
        requests: list[GenerateRequest],
        kept_ids: frozenset[int],
    ) -> None:
        self._state = state
        self._samples = [
            _Running(self, state, index, OutputText(tokenizer, request, kept_ids), request)
            for index, request in enumerate(requests)
        ]
        self._scores = _PromptScores(requests)
        self._ready: dict[int, list[Piece]] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._num_unfinished = len(requests)
        self._has_tokens = False
        self._first_token = contextlib.ExitStack()
        self._exit = contextlib.ExitStack()

    async def __aenter__(self) -> Generation:
        self._exit.enter_context(self._state.generating(self))
        self._first_token.enter_context(self._state.first_token())
        for sample in self._samples:
            if self._error is None:
                sample.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for sample in self._samples:
            sample.end("abort")
        self._first_token.close()
        self._exit.close()
        self._count_prompts()

    @property
    def job_id(self) -> str:
        """By which the client knows its request."""
        return job_of(self._samples[0].request.id)

    @property
    def is_done(self) -> bool:
        """All samples have finished and all their pieces have been taken."""
        return self._num_unfinished == 0

    async def take(self) -> list[Piece]:
        """What is ready, one piece for each sample that has news; waits for some, or for `nudge`.

        Raises what ended the generation, after the pieces that came before it.
        """
        if not self._ready and self._error is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if not self._ready and self._error is not None:
            raise self._error
        ready, self._ready = self._ready, {}
        pieces = [each[0] if len(each) == 1 else _joined(each) for each in ready.values()]
        for piece in pieces:
            if piece.new.finish_reason is not None:
                self._num_unfinished -= 1
            if piece.new.token_ids and not self._has_tokens:
                self._has_tokens = True
                self._first_token.close()
        return pieces

    async def collect(self, count: UsageCount) -> list[Sample]:
        """Wait for all samples. Raises what ended the generation."""
        samples = [Sample() for _ in self._samples]
        while not self.is_done:
            for piece in await self.take():
                count.add(piece)
                samples[piece.index].push(piece.new, piece.raw)
        return samples

    def nudge(self) -> None:
        """Let `take` return, with nothing if nothing is ready."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def add(self, piece: Piece) -> None:
        """For `take`."""
        for each in self._scores.release(piece):
            self._ready.setdefault(each.index, []).append(each)
            self.nudge()

    def fail(self, error: Exception) -> None:
        """End all samples with `error`, which `take` raises after what came before it."""
        self._error = self._error or error
        self.nudge()
        for sample in self._samples:
            sample.end("abort")

    def _count_prompts(self) -> None:
        """The samples of a prompt follow each other."""
        num_samples = 1 + max(sample.request.sample_index for sample in self._samples)
        lens = [sample.num_generated for sample in self._samples]
        for start in range(0, len(lens), num_samples):
            self._state.metrics.prompt_ended(lens[start : start + num_samples])


class _PromptScores:
    """A prompt is scored by its first sample alone. The pieces of its others wait for that, and the
    first one of each has the log-probabilities too.
    """

    def __init__(self, requests: list[GenerateRequest]) -> None:
        self._leads = [index - each.sample_index for index, each in enumerate(requests)]
        scorers = (i for i, each in enumerate(requests) if each.params.prompt_logprobs is not None)
        self._held: dict[int, list[Piece]] = {lead: [] for lead in scorers}
        self._scores: dict[int, Collection[TokenLogprob | None]] = {}
        self._told: set[int] = set()

    def release(self, piece: Piece) -> list[Piece]:
        """What may be shown when this piece has come."""
        lead, scores = self._leads[piece.index], piece.raw.prompt_logprobs
        if scores is not None:
            self._scores[lead] = scores
            self._told.add(lead)
            return [piece, *map(self._scored, self._held.pop(lead))]
        if lead in self._held:
            self._held[lead].append(piece)
            return []
        return [self._scored(piece)]

    def _scored(self, piece: Piece) -> Piece:
        scores = self._scores.get(self._leads[piece.index])
        if scores is None or piece.index in self._told:
            return piece
        self._told.add(piece.index)
        return replace(piece, raw=replace(piece.raw, prompt_logprobs=scores))


class _Running:
    """One sample in the engine, a `Sink`: makes text of each delta as it arrives, so that a stop
    string ends the request in time however slow its reader is.
    """

    def __init__(
        self,
        generation: Generation,
        state: ServerState,
        index: int,
        output: OutputText,
        request: GenerateRequest,
    ) -> None:
        self._generation, self._index = generation, index
        self._output, self.request = output, request
        self._client = state.client
        self._timer = state.request_timer(request)

    @property
    def num_generated(self) -> int:
        return self._timer.num_generated

    def start(self) -> None:
        try:
            self._client.submit(self.request, self)
        except Exception as error:
            self.fail(error)

    def put(self, delta: RequestDelta) -> None:
        try:
            _raise_failure(delta)
            new = self._output.push(delta)
            self._timer.push(delta, len(new.token_ids))
            self._generation.add(Piece(self._index, new, delta))
            if new.finish_reason is not None:
                self.end(str(new.finish_reason))
        except Exception as error:
            self.fail(error)

    def fail(self, error: Exception) -> None:
        self._timer.finish("error")
        self._generation.fail(error)

    def end(self, reason: str) -> None:
        """Leave the engine, if it is not over there; the first reason counts."""
        self._timer.finish(reason)
        self._client.withdraw(self.request.id)


def _joined(pieces: list[Piece]) -> Piece:
    """Pieces of one sample, in order, as one."""
    news = [piece.new for piece in pieces]
    logprobs = [each.logprobs for each in news if each.logprobs is not None]
    new = replace(
        news[-1],
        text="".join(each.text for each in news),
        texts=list(chain.from_iterable(each.texts for each in news)),
        token_ids=list(chain.from_iterable(each.token_ids for each in news)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
    )
    return Piece(pieces[0].index, new, joined([piece.raw for piece in pieces]))


def _raise_failure(delta: RequestDelta) -> None:
    """One request failed in an engine that goes on, or was ended there."""
    if delta.is_refusal:
        raise bad_request(f"The request cannot be served: {delta.error}")
    if delta.finish_reason is FinishReason.ERROR:
        raise APIError(500, f"The engine could not finish the request: {delta.error or 'unknown'}")
    if delta.finish_reason is FinishReason.ABORT:
        raise ended_by_operator()
