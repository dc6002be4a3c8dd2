"""/v1/chat/completions: messages in, an assistant's message out."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET

from tokenspeed.parsers.chat_plan import ChatPlan, plan_chat
from tokenspeed.request import SamplingParams
from tokenspeed.server.chat_answer import ChatAnswer
from tokenspeed.server.generation import Piece
from tokenspeed.server.job import Job, Prompt, make_job, offload, require_tokenizer, write_down
from tokenspeed.server.logprobs import prompt_logprobs
from tokenspeed.server.protocol import Usage
from tokenspeed.server.protocol_chat import ChatCompletion, ChatRequest, ChunkChoice
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import ChunkEvents, stream_job
from tokenspeed.server.structured import check_grammar
from tokenspeed.text.output import Sample
from tokenspeed.text.text_side import TextSide


async def prepare(state: ServerState, request: ChatRequest, prefix: str = "chatcmpl-") -> Job:
    """Check, render the template and tokenize. `prefix` begins the job's id. Raises APIError or
    InvalidRequest.
    """
    _, text = state.require_ready()
    state.model_name(request.model)
    params = sampling_params(text, request)
    tokenizer = require_tokenizer(text, "messages")
    plan = plan_chat(state.config.output, text, request.chat)
    held = plan.held_to(params.structured_outputs)
    await check_grammar(state.grammars, request.forms, held)
    prompt = await _prompt(state, text, plan)
    form, is_open = plan.start(prompt.text or "", held, tokenizer)
    params = msgspec.structs.replace(params, structured_outputs=form)
    job = make_job(state, request, params, [prompt], prefix=prefix, prompt_field="messages")
    parser = plan.parser(is_open)
    if parser is None:
        return job
    kept_ids = tokenizer.special_ids(plan.form.markers)
    return dataclasses.replace(job, new_parser=parser, kept_ids=kept_ids)


def sampling_params(text: TextSide, request: ChatRequest) -> SamplingParams:
    """Before the form of calls is added. Raises APIError or InvalidRequest."""
    asked = request.max_completion_tokens
    return request.sampling_params(
        text.defaults,
        max_tokens=request.max_tokens if asked is None else asked,
        logprobs=request.num_logprobs,
    )


async def prompt(state: ServerState, request: ChatRequest) -> Prompt:
    """The prompt that the messages make, and nothing more. Raises APIError or InvalidRequest."""
    _, text = state.require_ready()
    state.model_name(request.model)
    return await _prompt(state, text, plan_chat(state.config.output, text, request.chat))


async def _prompt(state: ServerState, text: TextSide, plan: ChatPlan) -> Prompt:
    require_tokenizer(text, "messages")
    return await offload(state, "messages", _encode, text, plan)


def _encode(text: TextSide, plan: ChatPlan) -> Prompt:
    prompt, ids = plan.render(text)
    return Prompt(ids=ids, text=prompt)


async def complete(state: ServerState, request: ChatRequest, job: Job) -> ChatCompletion:
    """Run the job to its end."""
    count = job.usage_count()
    async with job.start(state) as generation:
        samples = await generation.collect(count)
    return await write_down(
        state, job, lambda: _completion(state, request, job, samples, count.usage)
    )


def _completion(
    state: ServerState, request: ChatRequest, job: Job, samples: list[Sample], usage: Usage
) -> ChatCompletion:
    scored, num_top = samples[0].prompt_logprobs, request.prompt_logprobs
    return ChatCompletion(
        id=job.id,
        created=job.created,
        model=job.model,
        choices=[
            _answer(state, request, job, index).choice(sample)
            for index, sample in enumerate(samples)
        ],
        usage=usage,
        prompt_logprobs=UNSET
        if scored is None or num_top is None
        else prompt_logprobs(job.tokenizer, scored, num_top),
        prompt_token_ids=job.prompts[0].ids if request.return_token_ids else UNSET,
    )


def stream(state: ServerState, request: ChatRequest, job: Job) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of events."""
    answers: dict[int, ChatAnswer] = {}

    def render(piece: Piece) -> list[ChunkChoice]:
        if piece.index not in answers:
            answers[piece.index] = _answer(state, request, job, piece.index)
        return answers[piece.index].chunks(piece)

    return stream_job(state, job, ChunkEvents(job, "chat.completion.chunk", request, render))


def _answer(state: ServerState, request: ChatRequest, job: Job, index: int) -> ChatAnswer:
    return ChatAnswer(request, job, index, state.config.server.reasoning_field)
