"""From the bytes of a request to a typed struct: what all APIs share.

A body is decoded by msgspec (which refuses NaN, Infinity, bad UTF-8 and lone surrogates), known but
unsupported fields are refused, unknown ones are named once on the log, integral floats become
integers where integers are meant, and the rest is converted strictly: no text for a number, no bool
for an integer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import msgspec

from tokenspeed.log import logger
from tokenspeed.request import MAX_STOP_STRINGS, MAX_TOKENS, SamplingParams
from tokenspeed.server.errors import APIError, bad_request, shorten, unsupported
from tokenspeed.server.structured import FORMS, structured_outputs
from tokenspeed.server.unsupported import UNSUPPORTED, Unsupported, refuse_unless_harmless
from tokenspeed.wording import type_error

MAX_WARNED_FIELDS = 256
MAX_SALT_CHARS = 256
MAX_USER_FIELD_CHARS = 64


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Tokens of one API request: each prompt counts once, every sample's output counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class RankedLogprob(msgspec.Struct, frozen=True, gc=False):
    """`rank` is 1 for the likeliest token; None for a prompt token outside the asked number. There
    may be millions, in which the garbage collector would find nothing.
    """

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprob = dict[str, RankedLogprob] | None
"""By token id; None for the first token of a prompt."""


class StreamOptions(msgspec.Struct, kw_only=True):
    """`include_obfuscation` is taken and without effect: nothing is ever padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RequestFields(msgspec.Struct, kw_only=True):
    """Fields of every API. None is what null and absence mean: the default.

    `unsupported` are fields that are known, but cannot be honoured. A kind that `takes_any` has no
    unknown ones.
    """

    unsupported: ClassVar[Unsupported] = {}
    takes_any: ClassVar[bool] = False

    model: str | None = None

    def check(self) -> None:
        """What holds between fields. Raises APIError."""


class SamplingFields(RequestFields, kw_only=True):
    """Fields of completions and chat.

    `user` to `safety_identifier` change nothing here and are taken as they come.
    """

    unsupported = UNSUPPORTED

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_key: Any = None
    safety_identifier: Any = None

    def check(self) -> None:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "only the value of n is taken; ask for n samples instead")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options needs stream: true", "stream_options")
        if self._options.continuous_usage_stats and not self.wants_usage:
            raise bad_request("continuous_usage_stats needs include_usage: true", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            raise unsupported("prompt_logprobs", "not together with stream")
        if self.cache_salt is not None and not 0 < len(self.cache_salt) <= MAX_SALT_CHARS:
            raise bad_request(f"cache_salt has 1 to {MAX_SALT_CHARS} characters", "cache_salt")
        kept = self.truncate_prompt_tokens
        if kept is not None and kept != -1 and not 1 <= kept <= MAX_TOKENS:
            raise bad_request(
                f"truncate_prompt_tokens must be -1 (what fits) or from 1 to {MAX_TOKENS}",
                "truncate_prompt_tokens",
            )

    @property
    def forms(self) -> dict[str, Any]:
        """The fields that demand a form of the output (server/structured.py)."""
        return {name: getattr(self, name) for name in FORMS}

    @property
    def wants_usage(self) -> bool:
        return bool(self._options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return bool(self._options.continuous_usage_stats)

    @property
    def _options(self) -> StreamOptions:
        return self.stream_options or StreamOptions()

    def sampling_params(
        self, defaults: Mapping[str, float], *, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """The request's values over `defaults` (the model's) over the built-in ones.

        Raises InvalidRequest for a value that is out of its range.
        """
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stop) > MAX_STOP_STRINGS:
            raise bad_request(f"stop takes at most {MAX_STOP_STRINGS} strings", "stop")
        values: dict[str, Any] = dict(defaults)
        values |= {
            name: value for name in _PLAIN_PARAMS if (value := getattr(self, name)) is not None
        }
        return SamplingParams(
            **values,
            max_tokens=max_tokens,
            logprobs=logprobs,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            logit_bias=_bias_by_id(self.logit_bias or {}),
            structured_outputs=structured_outputs(self.forms),
        )


_PLAIN_PARAMS = (
    "n",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "prompt_logprobs",
)

INTEGER_FIELDS = (
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "min_tokens",
    "top_k",
    "seed",
    "n",
    "best_of",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "priority",
)
"""Fields that JavaScript and Go clients may send as 10.0 (`logprobs` of chat is a bool: 1.0 becomes
1, which is refused just the same)."""

R = TypeVar("R", bound=RequestFields)


class FieldWarnings:
    """Names each unknown field once on the log; remembers a bounded number of them."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def warn(self, name: str) -> None:
        name = shorten(name, MAX_USER_FIELD_CHARS)
        if name not in self._seen and len(self._seen) < MAX_WARNED_FIELDS:
            self._seen.add(name)
            logger.warning("unknown request field %r is ignored", name)


def parse_json(body: bytes) -> Any:
    """The JSON value in `body`. Raises APIError, with the field's name where a number is broken."""
    try:
        return msgspec.json.decode(body)
    except RecursionError:
        raise bad_request("The JSON is nested too deeply.", None, "invalid_json") from None
    except msgspec.MsgspecError as error:
        field = _broken_number(body, str(error))
        where = f" ({field} is not a finite number)" if field else ""
        raise bad_request(f"The body is not JSON: {error}{where}", field, "invalid_json") from None


def parse_request(value: Any, kind: type[R], *, strict: bool, warnings: FieldWarnings) -> R:
    """A decoded JSON value as a request. Raises APIError naming the field that is wrong.

    With `strict`, an unknown field is refused, else it is ignored with a warning.
    """
    if not isinstance(value, dict):
        raise bad_request("The body must be a JSON object.", None, "invalid_json")
    known = kind.__struct_fields__
    for name in value:
        if name in known or kind.takes_any:
            continue
        if name in kind.unsupported:
            refuse_unless_harmless(name, value[name], kind.unsupported)
        else:
            if strict:
                raise bad_request(f"{shorten(name, 100)} is not a known field.", name)
            warnings.warn(name)
    value = value | {
        name: int(number)
        for name in INTEGER_FIELDS
        if isinstance(number := value.get(name), float) and number.is_integer()
    }
    try:
        request = msgspec.convert(value, kind)
    except RecursionError:
        raise bad_request("The JSON is nested too deeply.", None, "invalid_json") from None
    except msgspec.ValidationError as error:
        raise _conversion_error(error) from None
    request.check()
    return request


def _conversion_error(error: msgspec.ValidationError) -> APIError:
    """msgspec writes "Expected `int`, got `str` - at `$.messages[0].role`"."""
    message, _, path = str(error).partition(" - at ")
    found = re.search(r"\$\.([^`]+)`", path) or re.search(
        r"missing required field `(\w+)`", message
    )
    param = found[1].removesuffix("[...]") if found else None
    return bad_request(type_error(str(error)), param)


_KEY = re.compile(rb'"([A-Za-z_]\w{0,63})"\s*:')
_HUGE = re.compile(_KEY.pattern + rb"\s*-?\d[\d.]{0,400}[eE]\+?\d{3,}")


def _broken_number(body: bytes, error: str) -> str | None:
    """The field whose value is NaN, Infinity or too large for a float, if that is what is wrong."""
    place = re.search(r"\(byte (\d{1,12})\)$", error)
    if place is not None:
        at = int(place[1])
        keys = _KEY.findall(body, max(0, at - 300), at)
        is_name = body.startswith((b"NaN", b"Infinity"), at)
        return keys[-1].decode() if keys and is_name else None
    found = _HUGE.search(body)
    return found[1].decode() if found else None


def _bias_by_id(bias: dict[str, float]) -> dict[int, float]:
    for key in bias:
        if not re.fullmatch(r"0|-?[1-9]\d{0,18}", key, re.ASCII):
            raise bad_request(
                f"logit_bias has the key {shorten(key, 40)!r}, which is no token id", "logit_bias"
            )
    return {int(key): value for key, value in bias.items()}
