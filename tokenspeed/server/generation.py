"""All samples of one API request, running in the engine: their text as it comes, and the whole.

A task a sample reads the engine's deltas and turns them into text; whoever consumes takes all that
is ready at once. Leaving the `async with` block ends what still runs: the engine's client aborts a
request whose iteration is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from types import TracebackType

from tokenspeed.request import FinishReason, GenerateRequest, RequestDelta
from tokenspeed.server.errors import APIError
from tokenspeed.server.protocol import PromptTokensDetails, Usage
from tokenspeed.server.request_stats import RequestTimer
from tokenspeed.server.state import ServerState
from tokenspeed.text.output import OutputText, Sample, TextDelta
from tokenspeed.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
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
        self._tokenizer = tokenizer
        self._requests = requests
        self._kept_ids = kept_ids
        self._timers: list[RequestTimer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._pieces: list[Piece] = []
        self._wake = asyncio.Event()
        self._error: Exception | None = None
        self._num_unfinished = len(requests)
        self._exit = contextlib.ExitStack()

    async def __aenter__(self) -> Generation:
        self._exit.enter_context(self._state.generating(self))
        self._timers = [self._state.request_timer(request) for request in self._requests]
        self._tasks = [
            asyncio.create_task(self._pump(index, request))
            for index, request in enumerate(self._requests)
        ]
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._exit.close()
            self._count_prompts()

    @property
    def is_done(self) -> bool:
        """All samples have finished and all their pieces have been taken."""
        return self._num_unfinished == 0

    async def take(self, timeout_s: float | None = None) -> list[Piece]:
        """All pieces that are ready, in order; waits for one. Empty after `timeout_s` without any.

        Raises what ended the generation, after the pieces that came before it.
        """
        if not self._pieces and self._error is None:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        if not self._pieces and self._error is not None:
            raise self._error
        pieces, self._pieces = self._pieces, []
        self._num_unfinished -= sum(1 for piece in pieces if piece.new.finish_reason is not None)
        return pieces

    async def collect(self, count: UsageCount) -> list[Sample]:
        """Wait for all samples. Raises what ended the generation."""
        samples = [Sample() for _ in self._requests]
        while not self.is_done:
            for piece in await self.take():
                count.add(piece)
                samples[piece.index].push(piece.new, piece.raw)
        return samples

    def fail(self, error: Exception) -> None:
        """End all samples with `error`, which `take` raises after what came before it."""
        self._error = self._error or error
        self._wake.set()
        for task in self._tasks:
            task.cancel()

    def _count_prompts(self) -> None:
        """The samples of a prompt follow each other."""
        num_samples = 1 + max(request.sample_index for request in self._requests)
        lens = [timer.num_generated for timer in self._timers]
        for start in range(0, len(lens), num_samples):
            self._state.metrics.prompt_ended(lens[start : start + num_samples])

    async def _pump(self, index: int, request: GenerateRequest) -> None:
        timer = self._timers[index]
        waiting = contextlib.ExitStack()
        try:
            waiting.enter_context(self._state.first_token())
            output = OutputText(self._tokenizer, request, self._kept_ids)
            async with contextlib.aclosing(self._state.client.generate(request)) as deltas:
                async for delta in deltas:
                    _raise_failure(delta)
                    new = output.push(delta)
                    timer.push(delta, len(new.token_ids))
                    if new.token_ids:
                        waiting.close()
                    self._pieces.append(Piece(index, new, delta))
                    self._wake.set()
                    if new.finish_reason is not None:
                        timer.finish(str(new.finish_reason))
                        return
            raise APIError(500, "The engine ended the request without a reason.")
        except Exception as error:
            timer.finish("error")
            self.fail(error)
        finally:
            waiting.close()
            timer.finish("abort")


def _raise_failure(delta: RequestDelta) -> None:
    """One request failed in an engine that goes on."""
    if delta.finish_reason is FinishReason.ERROR:
        raise APIError(500, f"The engine could not finish the request: {delta.error or 'unknown'}")
    if delta.finish_reason is FinishReason.ABORT:
        raise APIError(500, "The request was aborted in the engine.", code="aborted")
