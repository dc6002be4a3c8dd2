"""Request and response of /v1/chat/completions as typed structs; `protocol.py` has the rest."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.parsers.chat_plan import Chat
from tokenspeed.request import MAX_LOGPROBS
from tokenspeed.server.errors import bad_request
from tokenspeed.server.protocol import PromptLogprob, SamplingFields, Usage
from tokenspeed.server.protocol_tools import ToolCall, ToolCallDelta
from tokenspeed.server.unsupported import UNSUPPORTED, Unsupported


class ChatRequest(SamplingFields, kw_only=True):
    messages: list[dict[str, Any]]
    """Their inside is checked where they are made ready for the template (text/messages.py)."""
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    """Checked with `tool_choice` (parsers/tools.py), and given to the template as they are."""
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None
    """False leaves reasoning where the model wrote it, in the content."""
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    def check(self) -> None:
        super().check()
        if not self.messages:
            raise bad_request("messages is an empty list", "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise bad_request(f"top_logprobs must be from 0 to {MAX_LOGPROBS}", "top_logprobs")
        for name in ("max_completion_tokens", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise bad_request(f"{name} must be at least 1, got {value}", name)

    @property
    def chat(self) -> Chat:
        """What is asked, apart from sampling."""
        continues, adds_prompt = bool(self.continue_final_message), self.add_generation_prompt
        return Chat(
            messages=self.messages,
            add_generation_prompt=not continues if adds_prompt is None else adds_prompt,
            continue_final_message=continues,
            add_special_tokens=bool(self.add_special_tokens),
            tools=self.tools,
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            reasoning_effort=self.reasoning_effort,
            separate_reasoning=self.separate_reasoning is not False,
            chat_template_kwargs=self.chat_template_kwargs or {},
        )

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


CHAT_ONLY: Unsupported = UNSUPPORTED | dict.fromkeys(
    ChatRequest.__struct_fields__, ((), "only /v1/chat/completions takes it")
)
"""Fields of chat, for the APIs that are made of it and have not all of them."""


class AlternativeLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct, frozen=True):
    """A generated token; `bytes` are its own, even where it holds part of a character."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[AlternativeLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ContentLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct, frozen=True, kw_only=True):
    """`content` is null where there is none but reasoning or calls."""

    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a stream: first a role, then what the answer is made of, last a finish reason,
    for each index.
    """

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
