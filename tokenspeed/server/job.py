"""A checked API request, ready to run: everything that can be refused has been refused before.

Making a job validates sampling, ids and lengths, resolves seed and token limit, and takes a place
in the queue; no byte has been sent to the client and nothing runs in the engine yet.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from tokenspeed.engine.messages import Ready
from tokenspeed.parsers.parser import OutputParser
from tokenspeed.request import (
    GenerateRequest,
    InvalidRequest,
    SamplingParams,
    check_priority,
    params_of_prompt,
    params_of_samples,
    resolve_max_tokens,
)
from tokenspeed.server.errors import bad_request, overloaded, unsupported
from tokenspeed.server.generation import Generation, UsageCount
from tokenspeed.server.offload import Overfull, Overrun
from tokenspeed.server.protocol import SamplingFields
from tokenspeed.server.state import ServerState
from tokenspeed.text.bad_words import with_bad_tokens
from tokenspeed.text.text_side import TextSide
from tokenspeed.text.tokenizer import Tokenizer

T = TypeVar("T")

_FREE_BYTES = 4096
_BYTES_PER_TOKEN = 4
"""Of parameters as they are sent: those of a usual request are not counted."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """Token ids, and the text that they were made from, if it was text."""

    ids: list[int]
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """One API request: `requests[p * n + s]` is sample s of prompt p. Whoever has it made runs it
    in a `with job.place` block, which gives its place in the queue back.
    """

    id: str
    created: int
    model: str
    params: SamplingParams
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    tokenizer: Tokenizer | None
    place: contextlib.ExitStack
    new_parser: Callable[[], OutputParser] | None = None
    """What takes a sample's text apart; None: it is all content."""
    kept_ids: frozenset[int] = frozenset()
    """Special tokens that it has to see."""

    def start(self, state: ServerState) -> Generation:
        return Generation(state, self.tokenizer, self.requests, self.kept_ids)

    def parser(self) -> OutputParser | None:
        """For one sample."""
        return self.new_parser() if self.new_parser else None

    def usage_count(self) -> UsageCount:
        return UsageCount([len(prompt.ids) for prompt in self.prompts], self.params.n)


def make_job(
    state: ServerState,
    fields: SamplingFields,
    params: SamplingParams,
    prompts: list[Prompt],
    *,
    prefix: str,
    prompt_field: str,
    default_max_tokens: int | None = None,
) -> Job:
    """Raises APIError or InvalidRequest for what cannot be served. `prefix` begins the id."""
    ready, text = state.require_ready()
    params = _settle(params, ready, text.tokenizer)
    priority = fields.priority or 0
    check_priority(priority, state.config.scheduler.scheduling_policy)
    num_sequences = _num_sequences(state, len(prompts), params.n)
    prompts, limits = fit_prompts(
        *(ready, fields, params, prompts),
        prompt_field=prompt_field,
        default_max_tokens=default_max_tokens,
    )
    limited = [params_of_prompt(params, limit) for limit in limits]
    model = state.model_name(fields.model)
    num_tokens = (sum(len(each.ids) for each in prompts) + _size(params) * len(prompts)) * params.n
    place = state.reserve(num_sequences, num_tokens)
    job_id = prefix + uuid.uuid4().hex
    seed = state.draw_seed() if params.seed is None else params.seed
    requests = [
        GenerateRequest(
            id=f"{job_id}-{number * params.n + sample}",
            prompt_ids=prompt.ids,
            params=each,
            seed=seed,
            sample_index=sample,
            cache_salt=fields.cache_salt,
            priority=priority,
        )
        for number, prompt in enumerate(prompts)
        for sample, each in enumerate(params_of_samples(limited[number], params.n))
    ]
    return Job(
        id=job_id,
        created=int(time.time()),
        model=model,
        params=params,
        prompts=prompts,
        requests=requests,
        tokenizer=text.tokenizer,
        place=place,
    )


def fit_prompts(
    ready: Ready,
    fields: SamplingFields,
    params: SamplingParams,
    prompts: list[Prompt],
    *,
    prompt_field: str,
    default_max_tokens: int | None,
) -> tuple[list[Prompt], list[int]]:
    """The prompts as the engine gets them, cut as `fields` ask, and how many tokens a sequence of
    each may generate. Raises APIError for one that cannot be served.
    """
    asked = default_max_tokens if params.max_tokens is None else params.max_tokens
    room = ready.max_model_len - (1 if asked is None else asked)
    prompts = [_truncate(each, fields.truncate_prompt_tokens, max(1, room)) for each in prompts]
    limits = [_limit(params, each, ready, prompt_field, default_max_tokens) for each in prompts]
    return prompts, limits


def _num_sequences(state: ServerState, num_prompts: int, num_samples: int) -> int:
    num_sequences, most = num_prompts * num_samples, state.config.server.max_sequences
    if num_sequences > most:
        raise bad_request(
            f"{num_prompts} prompts with n {num_samples} are {num_sequences} sequences; "
            f"at most {most} are taken (--max-sequences)",
            "n",
        )
    return num_sequences


def _settle(params: SamplingParams, ready: Ready, tokenizer: Tokenizer | None) -> SamplingParams:
    """`params` with ids in place of bad words. Raises APIError or InvalidRequest for tokens that
    the model has not, or that leave nothing to be sampled.
    """
    params = with_bad_tokens(params, tokenizer)
    params.check_vocabulary(ready.vocab_size)
    if params.stop and tokenizer is None:
        raise unsupported("stop", "this server runs without a tokenizer; use stop_token_ids")
    ends = set(params.stop_token_ids)
    if tokenizer is not None and not params.ignore_eos:
        ends |= tokenizer.eos_token_ids
    if params.min_tokens and params.allowed_token_ids and set(params.allowed_token_ids) <= ends:
        raise bad_request("min_tokens: all of allowed_token_ids end the output", "min_tokens")
    return params


def _size(params: SamplingParams) -> int:
    """What the parameters of a sequence take in the queue beside its prompt, as tokens: large ones
    are bans, biases and grammars, which each of n samples carries to the engine.
    """
    return max(0, len(msgspec.msgpack.encode(params)) - _FREE_BYTES) // _BYTES_PER_TOKEN


def _truncate(prompt: Prompt, kept: int | None, room: int) -> Prompt:
    """The last `kept` tokens of a prompt; -1: as many as there is room for."""
    kept = room if kept == -1 else kept
    return prompt if kept is None or len(prompt.ids) <= kept else Prompt(ids=prompt.ids[-kept:])


def _limit(
    params: SamplingParams, prompt: Prompt, ready: Ready, field: str, default: int | None
) -> int:
    """The number of tokens that a sequence of `prompt` may generate."""
    if not prompt.ids:
        raise bad_request(f"{field} has no tokens", field)
    if not 0 <= min(prompt.ids) <= max(prompt.ids) < ready.vocab_size:
        raise bad_request(
            f"{field} holds token ids outside the vocabulary of {ready.vocab_size} tokens", field
        )
    try:
        limit = resolve_max_tokens(len(prompt.ids), params, ready.max_model_len)
    except InvalidRequest as error:
        raise bad_request(str(error), field, error.code) from None
    if params.max_tokens is None and default is not None:
        limit = min(limit, default)
    return limit


async def write_down(state: ServerState, job: Job, write: Callable[[], T]) -> T:
    """Make a whole answer: in a thread if it has log-probabilities, which may be millions."""
    params = job.params
    if params.logprobs is None and params.prompt_logprobs is None:
        return write()
    return await offload(state, "logprobs", write)


async def offload(state: ServerState, field: str, function: Callable[..., T], *args: object) -> T:
    """Run text work in a thread; `field` is to blame if it does not come to an end."""
    try:
        return await state.offload.run(function, *args)
    except Overrun:
        limit_s = state.config.server.prompt_timeout
        raise bad_request(
            f"{field}: turning text into tokens, or tokens into text, takes longer than "
            f"{limit_s:g} s (--prompt-timeout)",
            field,
        ) from None
    except Overfull:
        raise overloaded(
            "Too many texts wait to be turned into tokens, or tokens into text. Retry later."
        ) from None


def require_tokenizer(text: TextSide, field: str) -> Tokenizer:
    if text.tokenizer is None:
        raise bad_request(
            "This server runs without a tokenizer (--skip-tokenizer-init): send /v1/completions "
            "a prompt of token ids",
            field,
        )
    return text.tokenizer
