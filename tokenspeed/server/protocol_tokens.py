"""Requests and answers of the calls that show what a prompt is made of, as typed structs.

/tokenize and /detokenize are vLLM's.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed.server.errors import bad_request
from tokenspeed.server.protocol import RequestFields

_TEXTS = ("prompt", "content", "text", "inputs")
"""What other engines call the text."""


class TokenizeRequest(RequestFields, kw_only=True):
    """Text under one of the names of `_TEXTS`, or `messages` with what belongs to them.
    `add_special_tokens` is true for text by default, and false for messages, whose template has
    them.
    """

    prompt: str | None = None
    content: str | None = None
    text: str | None = None
    inputs: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        given = [name for name in (*_TEXTS, "messages") if getattr(self, name) is not None]
        if len(given) != 1:
            raise bad_request("send either prompt or messages", "prompt")
        for name in ("tools", "add_generation_prompt", "continue_final_message"):
            if self.messages is None and getattr(self, name) is not None:
                raise bad_request(f"{name} needs messages", name)

    @property
    def given_text(self) -> str | None:
        """The text; None for messages."""
        texts = (getattr(self, name) for name in _TEXTS)
        return next((text for text in texts if text is not None), None)


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """`token_strs` are shown as log-probabilities show tokens."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(RequestFields, kw_only=True):
    tokens: list[int]


class Text(msgspec.Struct, frozen=True):
    prompt: str


class RenderedPrompt(msgspec.Struct, frozen=True):
    """A prompt as the engine would get it. `text` None: it was sent as ids."""

    text: str | None
    token_ids: list[int]


class RenderedPrompts(msgspec.Struct, frozen=True, kw_only=True):
    object: str = "prompts"
    model: str
    prompts: list[RenderedPrompt]
