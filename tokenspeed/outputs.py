"""What `LLM` hands to its caller."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from tokenspeed.request import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class ToolCall:
    """`arguments` are JSON as text, as the model wrote it: one object, unless `is_complete` is
    false because the call was cut or broke off.
    """

    id: str
    name: str
    arguments: str
    is_complete: bool = True


@dataclass(frozen=True, kw_only=True)
class AssistantMessage:
    """What an answer is made of."""

    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As a message of the next `LLM.chat`."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One finished sample. `token_ids` include the end-of-sequence id that ended it; `text` does
    not. `message` is the text taken apart: for `LLM.generate`, all of it is content. `error` says
    why the engine could not finish it, where `finish_reason` is "error".
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None
    message: AssistantMessage = AssistantMessage()
    error: str | None = None

    @property
    def cumulative_logprob(self) -> float:
        """Sum of the chosen tokens' log-probabilities; NaN unless `logprobs` was asked for."""
        if self.logprobs is None:
            return math.nan
        return sum(entry.logprob for entry in self.logprobs)


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What `LLM.generate` returns for one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    num_cached_tokens: int = 0
