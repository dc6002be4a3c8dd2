"""/v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from msgspec import UNSET

from tokenspeed.request import TokenLogprob
from tokenspeed.server.generation import Piece
from tokenspeed.server.job import Job, Prompt, make_job, offload, require_tokenizer
from tokenspeed.server.logprobs import chat_logprobs, prompt_logprobs
from tokenspeed.server.protocol_chat import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import stream_job
from tokenspeed.server.structured import check_grammar
from tokenspeed.text.output import Sample
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer


async def prepare(state: ServerState, request: ChatRequest) -> Job:
    """Check, render the template and tokenize. Raises APIError or InvalidRequest."""
    _, text = state.require_ready()
    state.model_name(request.model)
    asked = request.max_completion_tokens
    params = request.sampling_params(
        text.defaults,
        max_tokens=request.max_tokens if asked is None else asked,
        logprobs=request.num_logprobs,
    )
    tokenizer = require_tokenizer(text, "messages")
    await check_grammar(state.grammars, request.forms, params.structured_outputs)
    ids = await offload(state, "messages", _encode, text, tokenizer, request)
    return make_job(
        state, request, params, [Prompt(ids=ids)], prefix="chatcmpl", prompt_field="messages"
    )


def _encode(text: TextSide, tokenizer: Tokenizer, request: ChatRequest) -> list[int]:
    """The prompt's ids. Special tokens are the template's business, unless a request adds them."""
    continues, adds_prompt = request.continue_final_message, request.add_generation_prompt
    prompt = text.template.render(
        request.messages,
        add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
        continue_final_message=bool(continues),
        kwargs=request.chat_template_kwargs,
    )
    return tokenizer.encode(prompt, add_special_tokens=bool(request.add_special_tokens))


async def complete(state: ServerState, request: ChatRequest, job: Job) -> ChatCompletion:
    """Run the job to its end."""
    count = job.usage_count()
    async with job.start(state) as generation:
        samples = await generation.collect(count)
    scored, num_top = samples[0].prompt_logprobs, request.prompt_logprobs
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=[_choice(request, job, index, sample) for index, sample in enumerate(samples)],
        usage=count.usage,
        prompt_logprobs=UNSET
        if scored is None or num_top is None
        else prompt_logprobs(job.tokenizer, scored, num_top),
        prompt_token_ids=job.prompts[0].ids if request.return_token_ids else UNSET,
    )


def stream(state: ServerState, request: ChatRequest, job: Job) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of events."""
    begun: set[int] = set()

    def render(piece: Piece) -> list[ChunkChoice]:
        is_first = piece.index not in begun
        begun.add(piece.index)
        return _chunks(request, job, piece, is_first)

    return stream_job(state, job, request, "chat.completion.chunk", render)


def _choice(request: ChatRequest, job: Job, index: int, sample: Sample) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=AssistantMessage(content=sample.text),
        logprobs=_logprobs(request, job, sample.logprobs),
        finish_reason=str(sample.finish_reason),
        stop_reason=sample.stop_reason,
        token_ids=sample.token_ids if request.return_token_ids else UNSET,
    )


def _chunks(request: ChatRequest, job: Job, piece: Piece, is_first: bool) -> list[ChunkChoice]:
    """A role before the first content, content where there is any, a finish reason at the end.

    Tokens without text (an end-of-sequence id, half a character) make a content chunk only if
    logprobs or ids are asked for: entries add up to `completion_tokens`.
    """
    chunks: list[ChunkChoice] = []
    index, new = piece.index, piece.new
    wants_ids = request.return_token_ids
    if is_first:
        chunks.append(
            ChunkChoice(
                index=index,
                delta=Delta(role="assistant", content=""),
                prompt_token_ids=job.prompts[0].ids if wants_ids else UNSET,
            )
        )
    if new.text or (new.token_ids and (wants_ids or request.logprobs)):
        chunks.append(
            ChunkChoice(
                index=index,
                delta=Delta(content=new.text),
                logprobs=_logprobs(request, job, new.logprobs or []),
                token_ids=new.token_ids if wants_ids else UNSET,
            )
        )
    if new.finish_reason is not None:
        chunks.append(
            ChunkChoice(
                index=index,
                delta=Delta(),
                finish_reason=str(new.finish_reason),
                stop_reason=new.stop_reason,
            )
        )
    return chunks


def _logprobs(request: ChatRequest, job: Job, entries: list[TokenLogprob]) -> ChatLogprobs | None:
    num_top = request.num_logprobs
    return None if num_top is None else chat_logprobs(job.tokenizer, entries, num_top)
