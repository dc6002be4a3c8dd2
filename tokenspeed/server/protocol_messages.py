"""Request, answer and events of Anthropic's /v1/messages as typed structs."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from tokenspeed.server.errors import bad_request
from tokenspeed.server.protocol import RequestFields
from tokenspeed.server.protocol_chat import CHAT_ONLY
from tokenspeed.server.unsupported import Unsupported

_UNSUPPORTED: Unsupported = CHAT_ONLY | {
    "container": ((), "no code runs here"),
    "mcp_servers": (([],), "this server fetches nothing"),
    "context_management": (({"edits": []},), "send the messages that the model is to see"),
    "speed": (("standard",), "there is one speed"),
    "inference_geo": ((), "there is one place"),
    "max_tokens_to_sample": ((), "send max_tokens"),
    "n": ((1,), "a message is one sample"),
    "stop": ((), "send stop_sequences"),
}


class ThinkingOptions(msgspec.Struct, kw_only=True):
    """`budget_tokens` and `display` are taken and without effect: a model's reasoning has no budget
    of its own, and is shown whole.
    """

    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputConfig(msgspec.Struct, kw_only=True):
    effort: str | None = None
    format: Any = None


class PromptFields(RequestFields, kw_only=True):
    """What a prompt is made of. The inside of messages and blocks is checked where they become chat
    messages (messages_input.py). `cache_control` asks for what is always done: prefixes are cached.
    """

    unsupported: ClassVar[Unsupported] = _UNSUPPORTED

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: ThinkingOptions | None = None
    output_config: OutputConfig | None = None
    output_format: Any = None
    cache_control: Any = None

    def check(self) -> None:
        if self.thinking is not None and self.thinking.type not in THINKING:
            raise bad_request(f"thinking.type is one of {', '.join(THINKING)}", "thinking")
        if self.output_format is not None and self.form is not self.output_format:
            raise bad_request("output_config.format says what output_format says", "output_format")
        if self.form is not None and not isinstance(self.form, dict):
            raise bad_request("output_config.format must be an object", "output_config")

    @property
    def form(self) -> Any:
        """The form that the answer is to have."""
        inner = self.output_config.format if self.output_config else None
        return self.output_format if inner is None else inner


THINKING = ("enabled", "disabled", "adaptive")


class MessagesRequest(PromptFields, kw_only=True):
    """`metadata` and `service_tier` change nothing. `min_p` to `priority` are those of the other
    APIs.
    """

    max_tokens: int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: Any = None
    service_tier: Any = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 1:
            raise bad_request(f"max_tokens must be at least 1, got {self.max_tokens}", "max_tokens")


class CountTokensRequest(PromptFields, kw_only=True):
    """What a message would be asked for with."""


class TokenCount(msgspec.Struct, frozen=True):
    input_tokens: int


class _Typed(msgspec.Struct, tag_field="type", kw_only=True):
    """What carries its kind in the field `type`."""


class TextBlock(_Typed, tag="text"):
    text: str


class ThinkingBlock(_Typed, tag="thinking"):
    """Nothing is signed: `signature` is empty, and is not looked at."""

    thinking: str
    signature: str = ""


class ToolUseBlock(_Typed, tag="tool_use"):
    """`input` is empty where the call was cut: pieces of it are no object."""

    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True, kw_only=True):
    """`input_tokens` are those that were not found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class Message(_Typed, tag="message", kw_only=True):
    id: str
    role: str = "assistant"
    model: str
    content: list[Block]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class MessageStart(_Typed, tag="message_start"):
    message: Message


class BlockStart(_Typed, tag="content_block_start"):
    index: int
    content_block: Block


class TextPiece(_Typed, tag="text_delta"):
    text: str


class ThinkingPiece(_Typed, tag="thinking_delta"):
    thinking: str


class InputPiece(_Typed, tag="input_json_delta"):
    partial_json: str


class BlockDelta(_Typed, tag="content_block_delta"):
    index: int
    delta: TextPiece | ThinkingPiece | InputPiece


class BlockStop(_Typed, tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(_Typed, tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(_Typed, tag="message_stop"):
    """The last of all."""


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop
