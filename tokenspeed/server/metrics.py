"""Prometheus metrics under the names that dashboards for vLLM know, with the prefix `tokenspeed:`.

Gauges and totals of the engine are read from its latest `Stats` when they are scraped; times are
taken here, where tokens arrive. No label comes from user input.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector

from tokenspeed.engine.client import EngineClient

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
_SLOW = (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_SIZES = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5) if step * 10**power <= 2e5
)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_GAUGES = (
    ("num_requests_running", "requests in the running batch", "num_running"),
    ("num_requests_waiting", "requests that wait for a place in the batch", "num_waiting"),
    ("kv_cache_usage_perc", "share of KV pages held by requests, 0 to 1", "kv_usage"),
)
_COUNTERS = (
    ("prefix_cache_queries", "prompt tokens looked up in the prefix cache", "prefix_queries"),
    ("prefix_cache_hits", "prompt tokens served from the prefix cache", "prefix_hits"),
    ("num_preemptions", "requests whose KV was dropped to be computed again", "preemptions"),
    ("prompt_tokens", "prompt tokens processed", "prompt_tokens"),
    ("generation_tokens", "tokens generated", "generation_tokens"),
)
"""Metric, what it says, and the field of `Stats` that it shows."""


class Metrics:
    """One server's registry. `model_name` labels what concerns the model."""

    def __init__(self, model_name: str, version: str, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.model_name = model_name
        self.registry.register(_EngineCollector(model_name, version, client))
        ProcessCollector(registry=self.registry)
        self._http = Counter(
            "tokenspeed:http_requests",
            "HTTP requests answered",
            ("path", "method", "status"),
            registry=self.registry,
        )
        self.finished = Counter(
            "tokenspeed:request_success",
            "engine requests that ended, by reason",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(model_name, reason)
        self.first_token_s = self._histogram("time_to_first_token_seconds", _FAST + _SLOW)
        self.token_gap_s = self._histogram("inter_token_latency_seconds", _FAST + _SLOW[:4])
        self.latency_s = self._histogram("e2e_request_latency_seconds", _FAST + _SLOW)
        self.prompt_tokens = self._histogram("request_prompt_tokens", _SIZES)
        self.generated_tokens = self._histogram("request_generation_tokens", _SIZES)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(
            f"tokenspeed:{name}",
            name.replace("_", " "),
            ("model_name",),
            registry=self.registry,
            buckets=buckets,
        )
        return histogram.labels(self.model_name)

    def http_request(self, path: str, method: str, status: int) -> None:
        """Count an answer. `path` is a route's template, never what the client sent."""
        self._http.labels(path, method if method in _METHODS else "other", str(status)).inc()

    def request_timer(self, num_prompt: int) -> RequestTimer:
        return RequestTimer(self, num_prompt)

    def render(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class RequestTimer:
    """Times one engine request, from its submission to the first `finish`."""

    def __init__(self, metrics: Metrics, num_prompt: int) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._num_generated = 0
        self._began = self._latest = time.monotonic()
        self._is_finished = False

    def tokens(self, count: int) -> None:
        """`count` tokens arrived together; the gap before them counts once for each."""
        if count == 0:
            return
        now = time.monotonic()
        if self._num_generated == 0:
            self._metrics.first_token_s.observe(now - self._began)
        else:
            for _ in range(count):
                self._metrics.token_gap_s.observe((now - self._latest) / count)
        self._num_generated += count
        self._latest = now

    def finish(self, reason: str) -> None:
        if self._is_finished:
            return
        self._is_finished = True
        metrics = self._metrics
        metrics.finished.labels(metrics.model_name, reason).inc()
        metrics.latency_s.observe(time.monotonic() - self._began)
        metrics.prompt_tokens.observe(self._num_prompt)
        metrics.generated_tokens.observe(self._num_generated)


class _EngineCollector:
    """Shows the engine's latest `Stats`, whether it serves, and the build."""

    def __init__(self, model_name: str, version: str, client: EngineClient) -> None:
        self._model_name, self._version, self._client = model_name, version, client

    def describe(self) -> list[Metric]:
        """Nothing is known ahead: a registry would otherwise collect once to learn the names."""
        return []

    def collect(self) -> Iterable[Metric]:
        is_up = float(self._client.state == "ready")
        yield GaugeMetricFamily("tokenspeed:engine_up", "1 while the engine serves", value=is_up)
        build = GaugeMetricFamily("tokenspeed:build_info", "what runs", labels=["version"])
        build.add_metric([self._version], 1.0)
        yield build
        yield from self._jit()
        for kind, rows in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for name, help, field in rows:
                family = kind(f"tokenspeed:{name}", help, labels=["model_name"])
                family.add_metric([self._model_name], float(getattr(self._client.stats, field)))
                yield family

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
