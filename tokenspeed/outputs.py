"""What `LLM` hands to its caller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tokenspeed.request import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One finished sample. `token_ids` include the end-of-sequence id that ended it; `text` does
    not.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprob] | None = None

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
