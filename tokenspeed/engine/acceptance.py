"""What a row's result means for its request: tokens kept, the end of the request, its delta.

Stop checks happen here and nowhere else in the engine (stop strings are the text layer's business).
They lag the launched steps; what a row brings after the token that ended its request is dropped.
"""

from __future__ import annotations

from tokenspeed.batch import Row
from tokenspeed.engine.record import Request
from tokenspeed.request import FinishReason, RequestDelta, TokenLogprob


def keep_tokens(request: Request, token_ids: list[int]) -> int:
    """Append accepted tokens up to the one that ends the request. Returns how many were kept."""
    params, output = request.params, request.output_ids
    for count, token in enumerate(token_ids, start=1):
        may_stop = len(output) >= params.min_tokens
        output.append(token)
        is_eos = token in request.eos_ids and not params.ignore_eos
        if may_stop and (is_eos or token in params.stop_token_ids):
            request.finish_reason, request.stop_token = FinishReason.STOP, token
        elif len(output) >= request.max_tokens:
            request.finish_reason = FinishReason.LENGTH
        if request.finish_reason is not None:
            return count
    return len(token_ids)


def keep_prompt_logprobs(request: Request, row: Row, entries: list[TokenLogprob | None]) -> None:
    """Append the entries of the prompt positions row.start + 1 and on that are not known yet (a
    preempted request computes some of them again).
    """
    known = request.prompt_logprobs
    if known is None or len(known) == request.num_prompt:
        return
    num_again = len(known) - (row.start + 1)
    assert num_again >= 0, f"prompt logprobs of {request.id} have a gap before {row.start}"
    known.extend(entries[num_again:])
    assert len(known) <= request.num_prompt, f"surplus prompt logprobs of {request.id}"


def make_delta(
    request: Request, token_ids: list[int], logprobs: list[TokenLogprob] | None = None
) -> RequestDelta:
    """What is new, and with the first delta what is to be said about the prompt."""
    delta = RequestDelta(
        request_id=request.id,
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_token=request.stop_token,
        error=request.error,
        is_refusal=request.is_refusal,
        timing=request.timeline.news(is_last=request.finish_reason is not None),
    )
    if not request.is_reported:
        request.is_reported = True
        delta.num_cached_tokens = request.num_cached_tokens
        known = request.prompt_logprobs
        if known is not None and len(known) == request.num_prompt:
            delta.prompt_logprobs = known
    return delta
