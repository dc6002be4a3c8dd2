"""Deltas of one request that are taken together, as one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from tokenspeed.request import RequestDelta


def joined(deltas: Sequence[RequestDelta]) -> RequestDelta:
    """One that says what all of them do, which follow each other."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    logprobs = [each.logprobs for each in deltas if each.logprobs is not None]
    prompts = (each.prompt_logprobs for each in deltas if each.prompt_logprobs is not None)
    timings = (each.timing for each in reversed(deltas) if each.timing is not None)
    return RequestDelta(
        request_id=last.request_id,
        token_ids=list(chain.from_iterable(each.token_ids for each in deltas)),
        logprobs=list(chain.from_iterable(logprobs)) if logprobs else None,
        prompt_logprobs=next(prompts, None),
        num_cached_tokens=max(each.num_cached_tokens for each in deltas),
        finish_reason=last.finish_reason,
        stop_token=last.stop_token,
        error=last.error,
        timing=next(timings, None),
    )
