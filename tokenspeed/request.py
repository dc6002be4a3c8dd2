"""What is asked of the engine and what comes back: the nouns that every layer shares.

`GenerateRequest` and `RequestDelta` travel between processes (typed msgpack). Nothing here imports
torch.
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Collection

import msgspec

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.options import Suggesting
from tokenspeed.timeline import Timing
from tokenspeed.wording import type_error

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_BIAS_ENTRIES = 1024
MAX_ALLOWED_IDS = 1024
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_BAD_WORD_TOKENS = 128
MAX_SAMPLES = 128
MAX_TOP_K = 1 << 20
MAX_SEED = (1 << 63) - 1
MAX_TOKENS = 1 << 30
MAX_PRIORITY = (1 << 31) - 1
POLICIES = ("fcfs", "priority")
"""In which order requests are served: as they come, or by priority and then as they come."""


class InvalidRequest(ValueError):
    """A request that cannot be served as asked: `param` names the field, `code` is OpenAI's."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class SamplingParams(
    msgspec.Struct, metaclass=Suggesting, frozen=True, kw_only=True, forbid_unknown_fields=True
):
    """How one request is sampled. Every number is checked on both sides (NaN fails every check).

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `max_tokens` None is whatever fits the
    context; 0 scores the prompt only. `logprobs` None is off, 0 the chosen token alone, k also the
    k likeliest. Log-probabilities are those of the model's distribution, before temperature,
    penalties, bias and masks. Presence and frequency penalties count generated tokens, repetition
    also counts the prompt. `structured_outputs` demands a form of the output.

    `allowed_token_ids` are the only ones that are sampled. `bad_token_ids` are sequences that are
    never generated: the last token of one is banned where the others stand before it in the
    output. `bad_words` are such sequences as text (`text.bad_words` turns them into ids).

    From Python, None also stands for no `stop`, `stop_token_ids`, `bad_words` or `logit_bias`.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop: object = self.stop  # a caller in Python may give one string
        if isinstance(stop, str):
            msgspec.structs.force_setattr(self, "stop", (stop,))
        for name, kind in _TYPES.items():
            given = getattr(self, name)
            try:
                value = msgspec.convert(_NONE.get(name) if given is None else given, kind)
            except msgspec.ValidationError as error:
                raise InvalidRequest(type_error(str(error), name), name) from None
            msgspec.structs.force_setattr(self, name, value)
            if name in _BOUNDS and value is not None:
                _check_bounds(name, value)
        if self.max_tokens is not None:
            _check_min_tokens(self.min_tokens, self.max_tokens)
        if self.structured_outputs is not None:
            for name in ("ignore_eos", "min_tokens"):
                if getattr(self, name):
                    raise InvalidRequest(
                        f"{name} cannot hold under structured_outputs: the grammar says when the "
                        "output ends",
                        name,
                    )
        for name, most in _MOST_ENTRIES.items():
            if len(getattr(self, name) or ()) > most:
                raise InvalidRequest(f"{name} takes at most {most} entries", name)
        if any(not 0 < len(text) <= MAX_STOP_CHARS for text in self.stop):
            raise InvalidRequest(f"each stop string has 1 to {MAX_STOP_CHARS} characters", "stop")
        self._check_bans()
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidRequest(
                    f"logit_bias of {token} must be from -100 to 100, got {bias}", "logit_bias"
                )

    def _check_bans(self) -> None:
        if any(not 0 < len(word.strip()) <= MAX_BAD_WORD_CHARS for word in self.bad_words):
            raise InvalidRequest(
                f"each bad word has 1 to {MAX_BAD_WORD_CHARS} characters", "bad_words"
            )
        if any(not 0 < len(ids) <= MAX_BAD_WORD_TOKENS for ids in self.bad_token_ids):
            raise InvalidRequest(
                f"each bad word has 1 to {MAX_BAD_WORD_TOKENS} tokens", "bad_words"
            )
        if self.allowed_token_ids is None:
            return
        if not self.allowed_token_ids:
            raise InvalidRequest(
                "allowed_token_ids is empty: no token could be sampled", "allowed_token_ids"
            )
        if set(self.allowed_token_ids) <= {ids[0] for ids in self.bad_token_ids if len(ids) == 1}:
            raise InvalidRequest("bad_words ban all of allowed_token_ids", "bad_words")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if an id stands outside the model's vocabulary."""
        named = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_token_ids": [token for ids in self.bad_token_ids for token in ids],
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise InvalidRequest(
                        f"{name} names token {token}, but the vocabulary has {vocab_size} tokens",
                        name,
                    )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


_TYPES = {field.name: field.type for field in msgspec.structs.fields(SamplingParams)}
"""Looked up once: it takes a millisecond."""

_NONE: dict[str, object] = {"stop": (), "stop_token_ids": (), "bad_words": (), "logit_bias": {}}
"""What None stands for, where it is no value of its own."""

_BOUNDS: dict[str, tuple[float, float]] = {
    "n": (1, MAX_SAMPLES),
    "max_tokens": (0, MAX_TOKENS),
    "min_tokens": (0, MAX_TOKENS),
    "temperature": (0.0, 2.0),
    "top_p": (0.0, 1.0),
    "top_k": (-1, MAX_TOP_K),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "seed": (0, MAX_SEED),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
_ABOVE_LOW = frozenset({"top_p"})
"""Their lower bound itself is not allowed."""

_MOST_ENTRIES = {
    "stop": MAX_STOP_STRINGS,
    "stop_token_ids": MAX_STOP_IDS,
    "logit_bias": MAX_BIAS_ENTRIES,
    "allowed_token_ids": MAX_ALLOWED_IDS,
    "bad_words": MAX_BAD_WORDS,
    "bad_token_ids": 2 * MAX_BAD_WORDS,
}


def _check_bounds(name: str, value: float) -> None:
    low, high = _BOUNDS[name]
    if not low <= value <= high or (name in _ABOVE_LOW and value == low):
        bounds = f"above {low} and at most" if name in _ABOVE_LOW else f"from {low} to"
        raise InvalidRequest(f"{name} must be {bounds} {high}, got {value!s:.40}", name)


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise InvalidRequest(
            f"min_tokens ({min_tokens}) is above max_tokens ({max_tokens})", "min_tokens"
        )


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate, as it travels to the engine; n samples are n of these.

    `seed` is resolved (the caller draws one where the user gave none), so a retry gives the same
    tokens. `cache_salt` and `adapter` separate prefix-cache entries that must not be shared. Of two
    that wait, the one of lower `priority` is served first.
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    seed: int = 0
    sample_index: int = 0
    cache_salt: str | None = None
    adapter: str | None = None
    priority: int = 0


def check_priority(priority: int, policy: str) -> None:
    """Raise InvalidRequest for a priority out of range, or one that `policy` would not heed."""
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise InvalidRequest(
            f"priority must be from {-MAX_PRIORITY} to {MAX_PRIORITY}, got {priority!s:.40}",
            "priority",
        )
    if priority and policy != "priority":
        raise InvalidRequest(
            "priority is not supported: requests are served in the order in which they come "
            "(--scheduling-policy priority heeds it)",
            "priority",
            "unsupported_parameter",
        )


def params_of_samples(params: SamplingParams, count: int) -> list[SamplingParams]:
    """What each of `count` samples of one prompt asks for. Only the first scores the prompt, which
    takes a prefill of its own: the prompt's log-probabilities are those of all its samples.
    """
    if params.prompt_logprobs is None:
        return [params] * count
    unscored = copy.copy(params)
    msgspec.structs.force_setattr(unscored, "prompt_logprobs", None)
    return [params, *[unscored] * (count - 1)]


def params_of_prompt(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """`params` for each single sequence of a prompt that may be followed by `max_tokens`. Raises
    InvalidRequest if that is less than `min_tokens`. All else has been checked, which takes long
    for large parameters, and is not checked again for each of a thousand prompts.
    """
    _check_min_tokens(params.min_tokens, max_tokens)
    one = copy.copy(params)
    msgspec.structs.force_setattr(one, "n", 1)
    msgspec.structs.force_setattr(one, "max_tokens", max_tokens)
    return one


def job_of(request_id: str) -> str:
    """The job, by whose id a client knows it, that a request is a sample of: "job-0"."""
    return request_id.rpartition("-")[0]


def resolve_max_tokens(num_prompt: int, params: SamplingParams, max_model_len: int) -> int:
    """Tokens to generate: what was asked, or what fits. Prompt plus output may fill the context.
    Raises InvalidRequest.
    """
    if not num_prompt:
        raise InvalidRequest("the prompt is empty: it needs at least one token", "prompt")
    room = max_model_len - num_prompt
    if params.max_tokens is None and room >= 1:
        return room
    wanted = 1 if params.max_tokens is None else params.max_tokens
    if wanted > room:
        asked = "" if params.max_tokens is None else f" and asks for {wanted} in the completion"
        raise InvalidRequest(
            f"This model's maximum context length is {max_model_len} tokens, but the request has "
            f"{num_prompt} in the prompt{asked}.",
            "prompt",
            "context_length_exceeded",
        )
    return wanted


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probability of one token at one position, and the likeliest tokens there, best
    first.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = []


class RequestDelta(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one engine step added to one request. The last delta of a request has a finish reason.

    `stop_token` is the id that ended the request, when it was one of `stop_token_ids` or an
    end-of-sequence id. `prompt_logprobs` arrives once, with the first delta: one entry a prompt
    token, the first None. `timing` comes with the first token, when it has changed, and at the end.
    `is_refusal`: the error is that what was asked cannot be done.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: Collection[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    error: str | None = None
    is_refusal: bool = False
    timing: Timing | None = None
