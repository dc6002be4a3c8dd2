"""The engine's own figures as metrics: its latest `Stats`, whether it serves, and the build."""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from tokenspeed.config import CacheConfig
from tokenspeed.engine.attached import AttachedClient

_GAUGES = (
    ("num_requests_running", "requests in the running batch", "num_running"),
    ("num_requests_waiting", "requests that wait for a place in the batch", "num_waiting"),
    ("kv_cache_usage_perc", "share of KV pages held by requests, 0 to 1", "kv_usage"),
    ("graphs_to_come", "CUDA graphs still to be recorded while nobody waits", "graphs_to_come"),
)
_COUNTERS = (
    ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", "prefix_queries"),
    ("prefix_cache_hits", "prompt tokens served from the prefix cache", "prefix_hits"),
    ("num_preemptions", "requests whose KV was dropped to be computed again", "preemptions"),
    ("num_late_masks", "times that a grammar's mask was late for its step", "late_masks"),
    ("prompt_tokens", "prompt tokens processed", "prompt_tokens"),
    ("generation_tokens", "tokens generated", "generation_tokens"),
    ("engine_steps", "steps of the engine", "steps"),
    ("engine_launch_seconds", "of its thread, to schedule and launch steps", "host_launch_s"),
    ("engine_commit_seconds", "of its thread, to commit and post results", "host_commit_s"),
    ("num_nan_aborted_requests", "requests ended by a result that is no number", "nan_aborted"),
)
"""Metric, what it says, and the field of `Stats` that it shows."""


class EngineCollector:
    """Collects from an engine's client at each scrape."""

    def __init__(
        self, cache: CacheConfig, model_name: str, version: str, client: AttachedClient
    ) -> None:
        self._cache, self._model_name = cache, model_name
        self._version, self._client = version, client

    def describe(self) -> list[Metric]:
        """Nothing is known ahead: a registry would otherwise collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        yield self._gauge("engine_up", "1 while the engine serves", self._client.state == "ready")
        yield self._info("build_info", "what runs", version=self._version)
        yield from self._cache_config()
        yield self._step_age()
        yield from self._jit()
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, field in rows:
                family = kind(f"tokenspeed:{name}", help, labels=["model_name"])
                family.add_metric([self._model_name], float(getattr(self._client.stats, field)))
                yield family

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        return GaugeMetricFamily(f"tokenspeed:{name}", help, value=float(value))

    def _info(self, name: str, help: str, **facts: str) -> Metric:
        family = GaugeMetricFamily(f"tokenspeed:{name}", help, labels=list(facts))
        family.add_metric(list(facts.values()), 1.0)
        return family

    def _cache_config(self) -> Iterable[Metric]:
        """The pool's size, which is known once the engine is ready."""
        ready = self._client.ready
        if ready is not None:
            yield self._info(
                "cache_config_info",
                "the KV cache",
                model_name=self._model_name,
                block_size=str(ready.block_size),
                num_gpu_blocks=str(ready.num_pages),
                cache_dtype=ready.kv_cache_dtype,
                enable_prefix_caching=str(self._cache.enable_prefix_caching),
            )

    def _step_age(self) -> Metric:
        """Grows while the engine has work and no step ends: it hangs, or a step is very long."""
        client = self._client
        has_work = client.stats.num_running or client.stats.num_waiting
        age = time.monotonic() - client.stats_at if has_work else 0.0
        return self._gauge("step_age_seconds", "since the last step ended, if there is work", age)

    def _jit(self) -> Iterable[Metric]:
        """The engine's ledger. Phase "startup" is before readiness, "serving" held up requests."""
        labels = ["kind", "phase"]
        count = CounterMetricFamily("tokenspeed:jit_compiles", "things compiled", labels=labels)
        seconds = CounterMetricFamily(
            "tokenspeed:jit_compile_seconds", "seconds spent compiling", labels=labels
        )
        for each in self._client.stats.jit:
            count.add_metric([each.kind, each.phase], float(each.count))
            seconds.add_metric([each.kind, each.phase], each.seconds)
        return count, seconds
