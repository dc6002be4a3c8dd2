"""/v1/completions: text or token ids in, text out, with echo and the old form of logprobs."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterator

import msgspec
from msgspec import UNSET

from tokenspeed.request import SamplingParams, TokenLogprob
from tokenspeed.server.generation import Piece
from tokenspeed.server.job import Job, Prompt, make_job, offload, require_tokenizer, write_down
from tokenspeed.server.logprobs import CompletionLogprobsWriter, prompt_logprobs
from tokenspeed.server.protocol_completions import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import ChunkEvents, stream_job
from tokenspeed.server.structured import check_grammar
from tokenspeed.text.output import Sample
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer


async def prepare(state: ServerState, request: CompletionRequest) -> Job:
    """Check and tokenize. Raises APIError or InvalidRequest."""
    _, text = state.require_ready()
    state.model_name(request.model)
    params = sampling_params(text, request)
    if request.echo and request.logprobs is not None:
        scored = max(request.logprobs, request.prompt_logprobs or 0)
        params = msgspec.structs.replace(params, prompt_logprobs=scored)
    await check_grammar(state.grammars, request.forms, params.structured_outputs)
    return make_job(
        state,
        request,
        params,
        await prompts(state, request),
        prefix="cmpl-",
        prompt_field="prompt",
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )


def sampling_params(text: TextSide, request: CompletionRequest) -> SamplingParams:
    """Before the scores of an echo are added. Raises APIError or InvalidRequest."""
    return request.sampling_params(
        text.defaults, max_tokens=request.max_tokens, logprobs=request.logprobs
    )


async def prompts(state: ServerState, request: CompletionRequest) -> list[Prompt]:
    """The prompts, and nothing more. Raises APIError or InvalidRequest."""
    _, text = state.require_ready()
    given = request.prompts()
    texts = [prompt for prompt in given if isinstance(prompt, str)]
    if not texts:
        return [Prompt(ids=prompt) for prompt in given if not isinstance(prompt, str)]
    tokenizer = require_tokenizer(text, "prompt")
    special = request.add_special_tokens is not False
    encoded = await offload(state, "prompt", _encode, tokenizer, texts, special)
    return [Prompt(ids=ids, text=text) for ids, text in zip(encoded, texts, strict=True)]


def _encode(tokenizer: Tokenizer, texts: list[str], special: bool) -> list[list[int]]:
    return [tokenizer.encode(text, add_special_tokens=special) for text in texts]


async def complete(state: ServerState, request: CompletionRequest, job: Job) -> Completion:
    """Run the job to its end."""
    count = job.usage_count()
    async with job.start(state) as generation:
        samples = await generation.collect(count)
    choices = await write_down(state, job, lambda: _choices(request, job, samples))
    return Completion(
        id=job.id, created=job.created, model=job.model, choices=choices, usage=count.usage
    )


def _choices(request: CompletionRequest, job: Job, samples: list[Sample]) -> list[CompletionChoice]:
    return [_ChoiceWriter(request, job, i).whole(sample) for i, sample in enumerate(samples)]


def stream(state: ServerState, request: CompletionRequest, job: Job) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of events."""
    writers = [_ChoiceWriter(request, job, index) for index in range(len(job.requests))]

    def render(piece: Piece) -> list[CompletionChoice]:
        return writers[piece.index].piece(piece)

    return stream_job(state, job, ChunkEvents(job, "text_completion", request, render))


class _ChoiceWriter:
    """The choice `index` of an answer, piece by piece or whole. Its first part holds the echo."""

    def __init__(self, request: CompletionRequest, job: Job, index: int) -> None:
        self._request, self._job, self._index = request, job, index
        self._prompt = job.prompts[index // job.params.n]
        self._echo = self._prompt_text() if request.echo else ""
        self._is_first = True
        self._logprobs = CompletionLogprobsWriter(
            job.tokenizer, request.logprobs or 0, job.params.skip_special_tokens, self._echo
        )

    def whole(self, sample: Sample) -> CompletionChoice:
        prompt = CompletionLogprobs([], [], [], [])
        for part in self._scored(sample.prompt_logprobs):
            prompt.extend(part)
        choice = self._part(sample.text, sample.token_ids, sample.logprobs, prompt)
        num_top, scored = self._request.prompt_logprobs, sample.prompt_logprobs
        return msgspec.structs.replace(
            choice,
            finish_reason=str(sample.finish_reason),
            stop_reason=sample.stop_reason,
            prompt_logprobs=prompt_logprobs(self._job.tokenizer, scored, num_top)
            if num_top is not None and scored is not None
            else UNSET,
        )

    def piece(self, piece: Piece) -> list[CompletionChoice]:
        """Nothing while its text is held back; several where it has the scores of a long prompt."""
        new = piece.new
        *ahead, prompt = self._scored(piece.raw.prompt_logprobs)
        choices = [self._part("", [], [], part) for part in ahead]
        choice = self._part(new.text, new.token_ids, new.logprobs or [], prompt)
        has_news = choice.text or choice.logprobs is not None or choice.token_ids is not UNSET
        if not has_news and new.finish_reason is None:
            return []
        finish = None if new.finish_reason is None else str(new.finish_reason)
        stop = new.stop_reason
        return [*choices, msgspec.structs.replace(choice, finish_reason=finish, stop_reason=stop)]

    def _scored(
        self, scored: Collection[TokenLogprob | None] | None
    ) -> Iterator[CompletionLogprobs]:
        """The prompt's part of the old form, in one or more; an empty one if it is not shown."""
        if self._request.logprobs is None or not self._request.echo or scored is None:
            return iter([CompletionLogprobs([], [], [], [])])
        return self._logprobs.prompt(self._prompt.ids, scored)

    def _part(
        self,
        text: str,
        token_ids: list[int],
        logprobs: list[TokenLogprob],
        prompt: CompletionLogprobs,
    ) -> CompletionChoice:
        is_first, self._is_first = self._is_first, False
        wants_ids = self._request.return_token_ids
        return CompletionChoice(
            index=self._index,
            text=self._echo + text if is_first else text,
            logprobs=self._old_logprobs(logprobs, prompt),
            token_ids=token_ids if wants_ids else UNSET,
            prompt_token_ids=self._prompt.ids if wants_ids and is_first else UNSET,
        )

    def _old_logprobs(
        self, logprobs: list[TokenLogprob], prompt: CompletionLogprobs
    ) -> CompletionLogprobs | None:
        if self._request.logprobs is None:
            return None
        prompt.extend(self._logprobs.output(logprobs))
        return prompt

    def _prompt_text(self) -> str:
        if self._prompt.text is not None or self._job.tokenizer is None:
            return self._prompt.text or ""
        return self._job.tokenizer.decode(
            self._prompt.ids, skip_special_tokens=self._job.params.skip_special_tokens
        )
