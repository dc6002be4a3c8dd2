"""The metrics that vLLM has as well, once more under vLLM's names, for boards that ask for them."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

SHARED = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "request_success"),
    *("prompt_tokens", "generation_tokens", "iteration_tokens_total"),
    *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
    *("request_time_per_output_token_seconds", "request_queue_time_seconds"),
    *("request_inference_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens"),
    *("request_max_num_generation_tokens", "request_params_n", "request_params_max_tokens"),
)
"""Metrics with one name and one meaning in both, without prefix."""

FORMER = {
    "kv_cache_usage_perc": "gpu_cache_usage_perc",
    "inter_token_latency_seconds": "time_per_output_token_seconds",
}
"""What some of them were called in vLLM before; older boards still ask for these."""

ENGINE = "0"
"""vLLM numbers its engines in a label."""


class VllmNames:
    """A registry's shared metrics as `vllm:...`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterable[Metric]:
        for family in self._registry.collect():
            name = family.name.removeprefix("tokenspeed:")
            if name in SHARED:
                yield _renamed(family, name)
            if name in FORMER:
                yield _renamed(family, FORMER[name])


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(f"vllm:{name}", family.documentation, family.type)
    renamed.samples = [
        sample._replace(
            name=sample.name.replace(family.name, f"vllm:{name}", 1),
            labels={**sample.labels, "engine": ENGINE},
        )
        for sample in family.samples
    ]
    return renamed
