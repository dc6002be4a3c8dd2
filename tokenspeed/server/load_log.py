"""The log's line that says, every few seconds while there is load, how much: in vLLM's words."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.messages import Stats
from tokenspeed.log import logger


class LoadLog:
    """Turns the engine's figures of two moments into a line."""

    def __init__(self, stats: Stats, now: float) -> None:
        self._stats, self._time = stats, now
        self._hit_rate = 0.0

    def line(self, stats: Stats, now: float) -> str | None:
        """What happened since the last call, `now` being seconds; None if nothing did. The prefix
        cache's hit rate is that of the prompts since then, or the last one that was known.
        """
        is_another = stats.steps < self._stats.steps  # an engine that was started again
        before, self._stats = Stats() if is_another else self._stats, stats
        seconds, self._time = now - self._time, now
        num_prompt = stats.prompt_tokens - before.prompt_tokens
        num_generated = stats.generation_tokens - before.generation_tokens
        if not (num_prompt or num_generated or stats.num_running or stats.num_waiting):
            return None
        if (num_queries := stats.prefix_queries - before.prefix_queries) > 0:
            self._hit_rate = (stats.prefix_hits - before.prefix_hits) / num_queries
        host_s = stats.host_launch_s + stats.host_commit_s
        host_s -= before.host_launch_s + before.host_commit_s
        host_ms = 1e3 * host_s / max(1, stats.steps - before.steps)
        return (
            f"Avg prompt throughput: {num_prompt / seconds:.1f} tokens/s, "
            f"Avg generation throughput: {num_generated / seconds:.1f} tokens/s, "
            f"Running: {stats.num_running} reqs, Waiting: {stats.num_waiting} reqs, "
            f"KV cache usage: {stats.kv_usage:.1%}, Prefix cache hit rate: {self._hit_rate:.1%}, "
            f"Host time: {host_ms:.2f} ms a step"
        )


async def log_load(
    client: AttachedClient,
    interval_s: float,
    *,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> NoReturn:
    """Log until cancelled."""
    log = LoadLog(client.stats, clock())
    while True:
        await sleep(interval_s)
        line = log.line(client.stats, clock())
        if line is not None:
            logger.info("%s", line)
