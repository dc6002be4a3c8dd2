"""Request and response of /v1/completions as typed structs (`protocol.py` has the shared part)."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.server.errors import bad_request
from tokenspeed.server.protocol import PromptLogprob, SamplingFields, Usage

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(SamplingFields, kw_only=True):
    prompt: Any = None
    """str, [str], [int] or [[int]]: told apart by `prompts()`."""
    echo: bool | None = None
    logprobs: int | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_request("max_tokens 0 needs echo: true", "max_tokens")

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one entry each. Raises APIError for anything else; ids are checked later."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list):
            raise bad_request("prompt must be text, token ids, or a list of either", "prompt")
        if prompt and type(prompt[0]) is int:
            return [_token_ids(prompt, "prompt")]
        if not prompt:
            raise bad_request("prompt is an empty list", "prompt")
        if all(isinstance(entry, str) for entry in prompt):
            return list(prompt)
        return [_token_ids(entry, f"prompt[{index}]") for index, entry in enumerate(prompt)]


def _token_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise bad_request(
            f"{where} must be a list of token ids; text and ids cannot be mixed", "prompt"
        )
    return value


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The old form: four lists with an entry a token. The first prompt token has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]
    """Where each token starts in the choice's text, in characters."""

    def extend(self, more: CompletionLogprobs) -> None:
        self.tokens.extend(more.tokens)
        self.token_logprobs.extend(more.token_logprobs)
        self.top_logprobs.extend(more.top_logprobs)
        self.text_offset.extend(more.text_offset)


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """A choice, whole or (in a stream) what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[PromptLogprob] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
