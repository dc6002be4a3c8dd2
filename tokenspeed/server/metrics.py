"""Prometheus metrics under the names that dashboards for vLLM know, with the prefix `tokenspeed:`.

What the engine counts is read from its latest `Stats` when it is scraped (`engine_metrics.py`);
times are taken where tokens arrive (`request_stats.py`). No label comes from user input.

Several HTTP processes count in files of one folder (`sharing.share_metrics`), and each shows the
sum. A process that is started in the place of one that has ended counts on in its files, so that
nothing is lost and no file is added. What there is once is counted once: the engine's steps, and
the memory and time of the first process.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.process_collector import ProcessCollector

from tokenspeed.config import Config
from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.messages import Stats
from tokenspeed.server.engine_metrics import EngineCollector
from tokenspeed.server.metrics_compat import VllmNames
from tokenspeed.server.sharing import Shared

CACHE_S = 0.2
"""For how long a sum over many processes is shown again: anybody may ask for it."""

_FAST = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0)
_SLOW = (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_TIMES, _GAPS = _FAST + _SLOW, _FAST + _SLOW[:4]
_SIZES = tuple(
    float(step * 10**power) for power in range(6) for step in (1, 2, 5) if step * 10**power <= 2e5
)
_SAMPLES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 128.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class RepeatingHistogram(Histogram):
    """One that counts a value several times at the price of once."""

    def observe_times(self, amount: float, count: int) -> None:
        """As `count` calls of `observe`."""
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


class Metrics:
    """One server's metrics. `model_name` labels what concerns the model."""

    def __init__(
        self,
        config: Config,
        model_name: str,
        version: str,
        client: AttachedClient,
        shared: Shared,
    ) -> None:
        self.model_name = model_name
        self._shown = self._counted = CollectorRegistry()
        if shared.metrics_folder is not None:
            assert values.ValueClass is not values.MutexValue, "prometheus_client came too early"
            row = shared.queue.row
            values.ValueClass = values.MultiProcessValue(lambda: row)  # type: ignore[no-untyped-call]
            self._counted = CollectorRegistry()
            MultiProcessCollector(self._shown, str(shared.metrics_folder))  # type: ignore[no-untyped-call]
        self._is_summed = self._counted is not self._shown
        self._summing, self._sum, self._summed_at = asyncio.Lock(), b"", -CACHE_S
        self._shown.register(EngineCollector(config.cache, model_name, version, client))
        ProcessCollector(pid=lambda: shared.first_pid, registry=self._shown)
        self._http = Counter(
            "tokenspeed:http_requests",
            "HTTP requests answered",
            ("path", "method", "status"),
            registry=self._counted,
        )
        self._http_s = Histogram(
            "tokenspeed:http_request_duration_seconds",
            "from a request's arrival to the end of its answer",
            ("path", "method"),
            registry=self._counted,
            buckets=_TIMES,
        )
        self.finished = Counter(
            "tokenspeed:request_success",
            "engine requests that ended, by reason",
            ("model_name", "finished_reason"),
            registry=self._counted,
        )
        for reason in ("stop", "length", "abort", "error"):
            self.finished.labels(model_name, reason)
        self._add_histograms()
        self._aliases = VllmNames(self._shown) if config.server.metrics_compat == "vllm" else None
        if shared.number == 0:
            client.on_stats = _step_observer(self.step_tokens)

    def _add_histograms(self) -> None:
        add = self._histogram
        self.first_token_s = add(
            "time_to_first_token_seconds", "from submission to the first token", _TIMES
        )
        self.token_gap_s = add("inter_token_latency_seconds", "between tokens of a request", _GAPS)
        self.time_per_token_s = add(
            "request_time_per_output_token_seconds",
            "mean of a request after its first token",
            _GAPS,
        )
        self.latency_s = add("e2e_request_latency_seconds", "from submission to the end", _TIMES)
        self.queue_s = add(
            "request_queue_time_seconds", "from submission to the first step", _TIMES
        )
        self.inference_s = add(
            "request_inference_time_seconds", "from the first step to the end", _TIMES
        )
        self.prefill_s = add(
            "request_prefill_time_seconds", "from the first step to the first token", _TIMES
        )
        self.decode_s = add(
            "request_decode_time_seconds", "from the first token to the last", _TIMES
        )
        self.prompt_tokens = add("request_prompt_tokens", "tokens of a prompt", _SIZES)
        self.generated_tokens = add("request_generation_tokens", "tokens of an output", _SIZES)
        self.max_generated_tokens = add(
            "request_max_num_generation_tokens", "tokens of a prompt's longest output", _SIZES
        )
        self.max_tokens = add("request_params_max_tokens", "tokens that an output may have", _SIZES)
        self.num_samples = add("request_params_n", "outputs of a prompt", _SAMPLES)
        self.step_tokens = add("iteration_tokens_total", "tokens of an engine step", _SIZES)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> RepeatingHistogram:
        histogram = RepeatingHistogram(
            f"tokenspeed:{name}", help, ("model_name",), registry=self._counted, buckets=buckets
        )
        return histogram.labels(self.model_name)

    def http_request(self, path: str, method: str, status: int, seconds: float) -> None:
        """Count an answer. `path` is a route's template, never what the client sent."""
        method = method if method in _METHODS else "other"
        self._http.labels(path, method, str(status)).inc()
        self._http_s.labels(path, method).observe(seconds)

    def prompt_ended(self, output_lens: list[int]) -> None:
        """All samples of one prompt have ended, with so many tokens each."""
        self.num_samples.observe(len(output_lens))
        self.max_generated_tokens.observe(max(output_lens))

    async def scrape(self) -> bytes:
        """All metrics as text. To sum up the files of many processes takes tens of milliseconds:
        that is done in a thread, and once for all who ask meanwhile.
        """
        if not self._is_summed:
            return self.render()
        async with self._summing:
            now = time.monotonic()
            if now - self._summed_at >= CACHE_S:
                self._sum = await asyncio.to_thread(self.render)
                self._summed_at = now
            return self._sum

    def render(self) -> bytes:
        text: bytes = generate_latest(self._shown)
        if self._aliases is not None:
            text += generate_latest(self._aliases)
        return text


def _step_observer(step_tokens: RepeatingHistogram) -> Callable[[Stats, Stats], None]:
    """Told that the engine's figures were renewed, as a rule by one step. Knows one histogram, so
    that client and metrics do not hold each other.
    """

    def observe(before: Stats, after: Stats) -> None:
        num_steps = after.steps - before.steps
        if num_steps > 0:
            num_tokens = after.scheduled_tokens - before.scheduled_tokens
            step_tokens.observe_times(num_tokens / num_steps, num_steps)

    return observe
