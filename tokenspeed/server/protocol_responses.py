"""Request and response of /v1/responses as typed structs; `protocol_response_events.py` has the
events of a stream.
"""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.request import MAX_LOGPROBS
from tokenspeed.server.errors import bad_request, unsupported
from tokenspeed.server.protocol import RequestFields, StreamOptions
from tokenspeed.server.protocol_chat import CHAT_ONLY, ContentLogprob
from tokenspeed.server.unsupported import Unsupported

MAX_METADATA = 16
MAX_METADATA_CHARS = 512
LOGPROBS = "message.output_text.logprobs"
INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
"""Nothing is encrypted: reasoning comes in the clear, and is read so when it is sent back."""


class TextOptions(msgspec.Struct, kw_only=True):
    format: Any = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct, kw_only=True):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponsesRequest(RequestFields, kw_only=True):
    """`user` to `max_tool_calls` (no tool runs here) change nothing and are taken as they come. The
    fields from `top_k` on are those of the other APIs.
    """

    unsupported: ClassVar[Unsupported] = CHAT_ONLY | {
        "background": ((False,), "an answer ends when its client leaves"),
        "conversation": ((), "send previous_response_id, or all items"),
        "prompt": ((), "this server stores no prompts"),
        "context_management": (([],), "send the items that the model is to see"),
        "moderation": ((), "this server moderates nothing"),
        "messages": ((), "send input"),
        "max_tokens": ((), "send max_output_tokens"),
        "max_completion_tokens": ((), "send max_output_tokens"),
        "response_format": ((), "send text.format"),
        "reasoning_effort": ((), "send reasoning.effort"),
        "logprobs": ((False,), f"send include: [{LOGPROBS!r}] and top_logprobs"),
        "n": ((1,), "a response is one sample"),
    }

    input: str | list[dict[str, Any]]
    """The inside of items is checked where they become messages (responses_input.py)."""
    stream: bool | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    max_tool_calls: Any = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    def check(self) -> None:
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise bad_request("max_output_tokens must be at least 1", "max_output_tokens")
        if self.truncation not in (None, "disabled"):
            raise unsupported("truncation", "an input that does not fit is refused, never cut")
        for name in self.include or ():
            if name not in INCLUDES:
                raise unsupported("include", f"only {' and '.join(INCLUDES)} can be asked for")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
        text, reasoning = self.text or TextOptions(), self.reasoning or ReasoningOptions()
        if text.verbosity not in (None, "medium"):
            raise unsupported("text.verbosity", "the models here have no verbosity levels")
        if {reasoning.summary, reasoning.generate_summary} - {None, "auto"}:
            raise unsupported("reasoning.summary", "reasoning is shown whole, not summarised")
        pairs = self.metadata or {}
        longest = max((len(text) for pair in pairs.items() for text in pair), default=0)
        if len(pairs) > MAX_METADATA or longest > MAX_METADATA_CHARS:
            raise bad_request(
                f"metadata holds up to {MAX_METADATA} pairs of up to {MAX_METADATA_CHARS} "
                "characters each",
                "metadata",
            )

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())


class _Typed(msgspec.Struct, tag_field="type", kw_only=True):
    """What carries its kind in the field `type`."""


class ReasoningText(_Typed, tag="reasoning_text"):
    text: str


class OutputTextPart(_Typed, tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: list[ContentLogprob] = []


class ReasoningItem(_Typed, tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    status: str = "in_progress"


class MessageItem(_Typed, tag="message"):
    id: str
    role: str = "assistant"
    content: list[OutputTextPart] = []
    status: str = "in_progress"


class FunctionCallItem(_Typed, tag="function_call"):
    """`arguments` is JSON as text, as the model wrote it; a call that was cut is incomplete."""

    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


OutputItem = ReasoningItem | MessageItem | FunctionCallItem


class InputDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class Response(msgspec.Struct, kw_only=True):
    """The answer, or how far it has come; with the settings that it was made under. `store` says
    whether it can be asked for again.
    """

    id: str
    object: str = "response"
    created_at: int
    status: str = "in_progress"
    completed_at: int | None = None
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningOptions
    service_tier: str = "default"
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | UnsetType = UNSET


class DeletedResponse(msgspec.Struct, frozen=True):
    id: str
    object: str = "response"
    deleted: bool = True
