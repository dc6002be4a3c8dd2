"""One engine request from its submission to its end: timed, counted, and written to the log.

What only the engine knows (queue, prefill, delays) comes with its deltas; all else is measured
where tokens arrive. No text and no token is kept.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from tokenspeed.log import logger
from tokenspeed.request import GenerateRequest, RequestDelta
from tokenspeed.server.metrics import Metrics
from tokenspeed.timeline import Timing


@dataclass(frozen=True, kw_only=True)
class RequestStats:
    """The record of --enable-log-request-stats, whose repr is logged. `*_ms` are milliseconds,
    `*_ts` seconds since the epoch; what did not happen is 0. docs/observability.md explains each.
    """

    status: str
    reason: str
    prompt_tokens: int
    cache_tokens: int
    output_tokens: int
    cache_hit_rate: float
    queue_ms: float
    prefill_ms: float
    ttft_ms: float
    total_ms: float
    preempt_ms: float
    preempt_count: int
    decode_tps: float
    acc_len: float | None
    acc_rate: float | None
    recv_ts: float
    commit_ts: float
    finish_ts: float


class RequestTimer:
    """Times one request up to the first `finish`; `is_logged`: its record is written then."""

    def __init__(self, metrics: Metrics, request: GenerateRequest, *, is_logged: bool) -> None:
        self._metrics = metrics
        self._request = request
        self._is_logged = is_logged
        self._received_at = time.time()
        self._began = self._latest = time.monotonic()
        self._first: float | None = None
        self._timing = Timing()
        self._num_cached = 0
        self._is_finished = False
        self.num_generated = 0

    def push(self, delta: RequestDelta, num_tokens: int) -> None:
        """A delta arrived, which brought `num_tokens` to the output; the gap before several that
        come together counts once for each.
        """
        if delta.timing is not None:
            self._timing = delta.timing
        if delta.num_cached_tokens > self._num_cached:
            self._num_cached = delta.num_cached_tokens
        if num_tokens == 0:
            return
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.first_token_s.observe(now - self._began)
        else:
            self._metrics.token_gap_s.observe_times((now - self._latest) / num_tokens, num_tokens)
        self.num_generated += num_tokens
        self._latest = now

    def finish(self, reason: str) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        ended = time.monotonic()
        self._observe(reason, ended)
        if self._is_logged:
            logger.info("Req: %s Finish! %r", self._request.id, self._record(reason, ended))

    def _observe(self, reason: str, ended: float) -> None:
        metrics, timing = self._metrics, self._timing
        metrics.finished.labels(metrics.model_name, reason).inc()
        metrics.latency_s.observe(ended - self._began)
        metrics.prompt_tokens.observe(len(self._request.prompt_ids))
        metrics.generated_tokens.observe(self.num_generated)
        if self._request.params.max_tokens is not None:
            metrics.max_tokens.observe(self._request.params.max_tokens)
        if timing.queue_s > 0.0:
            metrics.queue_s.observe(timing.queue_s)
            metrics.inference_s.observe(ended - self._began - timing.queue_s)
        if timing.prefill_s > 0.0:
            metrics.prefill_s.observe(timing.prefill_s)
        if self._first is not None:
            metrics.decode_s.observe(self._latest - self._first)
            if self.num_generated > 1:
                per_token = (self._latest - self._first) / (self.num_generated - 1)
                metrics.time_per_token_s.observe(per_token)

    def _record(self, reason: str, ended: float) -> RequestStats:
        timing, num_prompt = self._timing, len(self._request.prompt_ids)
        decode_s = 0.0 if self._first is None else ended - self._first
        num_decoded = max(0, self.num_generated - 1)
        started_at = self._received_at + timing.queue_s if timing.queue_s > 0.0 else 0.0
        return RequestStats(
            status="aborted" if reason in ("abort", "error") else "finished",
            reason=reason,
            prompt_tokens=num_prompt,
            cache_tokens=self._num_cached,
            output_tokens=self.num_generated,
            cache_hit_rate=round(self._num_cached / num_prompt, 4) if num_prompt else 0.0,
            queue_ms=_ms(timing.queue_s),
            prefill_ms=_ms(timing.prefill_s),
            ttft_ms=0.0 if self._first is None else _ms(self._first - self._began),
            total_ms=_ms(ended - self._began),
            preempt_ms=_ms(timing.delay_s),
            preempt_count=timing.num_delays,
            decode_tps=round(num_decoded / decode_s, 1) if decode_s > 0.0 else 0.0,
            acc_len=None,
            acc_rate=None,
            recv_ts=round(self._received_at, 3),
            commit_ts=round(started_at, 3),
            finish_ts=round(self._received_at + ended - self._began, 3),
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
