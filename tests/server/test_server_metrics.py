"""/metrics, name by name: the tables here are all that it shows."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import Asker, FakeClient, make_state

from tokenspeed.engine.messages import Stats
from tokenspeed.server.metrics import RepeatingHistogram
from tokenspeed.timeline import Timing

GAUGES = """num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info
    engine_up build_info step_age_seconds graphs_to_come"""
COUNTERS = """prefix_cache_queries prefix_cache_hits num_preemptions num_late_masks prompt_tokens
    generation_tokens request_success num_nan_aborted_requests engine_steps jit_compiles
    jit_compile_seconds engine_launch_seconds engine_commit_seconds http_requests"""
HISTOGRAMS = """time_to_first_token_seconds inter_token_latency_seconds
    request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds
    request_inference_time_seconds request_prefill_time_seconds request_decode_time_seconds
    request_prompt_tokens request_generation_tokens request_max_num_generation_tokens
    request_params_n request_params_max_tokens iteration_tokens_total
    http_request_duration_seconds"""
OURS_ALONE = """engine_up build_info step_age_seconds graphs_to_come num_nan_aborted_requests
    num_late_masks engine_steps engine_launch_seconds engine_commit_seconds jit_compiles
    jit_compile_seconds http_requests http_request_duration_seconds"""
FORMER = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}
TYPES = {
    f"tokenspeed:{name}": kind
    for kind, names in (("gauge", GAUGES), ("counter", COUNTERS), ("histogram", HISTOGRAMS))
    for name in names.split()
}
DOCS = Path(__file__).parents[2] / "docs" / "observability.md"
QUEUED = Timing(queue_s=0.25, prefill_s=0.5, delay_s=0.125, num_delays=2)


def types(text: str) -> dict[str, str]:
    """Name -> type, without what the client library adds for each (`..._created`) and processes."""
    found = {family.name: family.type for family in text_string_to_metric_families(text)}
    return {
        name: kind
        for name, kind in found.items()
        if not name.startswith("process_") and not name.endswith("_created")
    }


def samples(text: str, prefix: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of the metrics with that prefix, which is cut, and without label `engine`."""
    return {
        (
            sample.name.removeprefix(prefix),
            tuple(sorted((k, v) for k, v in sample.labels.items() if k != "engine")),
        ): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix) and not sample.name.endswith("_created")
    }


async def test_the_names_are_those_of_the_table(ask: Asker) -> None:
    text = (await ask.http.get("/metrics")).text
    assert types(text) == TYPES
    assert "vllm:" not in text and "process_cpu_seconds_total" in text


def test_the_documentation_lists_them_all() -> None:
    rows = re.findall(r"^\| (`.*`) \| (gauge|counter|histogram) \|", DOCS.read_text(), re.MULTILINE)
    listed = [(name, kind) for names, kind in rows for name in re.findall(r"`(\w+)`", names)]
    assert len(listed) == len(dict(listed))
    assert {f"tokenspeed:{name}": kind for name, kind in listed} == TYPES


async def test_vllm_names_show_the_same() -> None:
    client = FakeClient()
    client.timing = QUEUED
    client.stats = Stats(num_running=3, kv_usage=0.5, prompt_tokens=7)
    ask = Asker(client, make_state(client, metrics_compat="vllm"))
    await ask.completion(n=3, max_tokens=4)
    text = (await ask.http.get("/metrics")).text
    shared = TYPES.keys() - {f"tokenspeed:{name}" for name in OURS_ALONE.split()}
    expected = {name.replace("tokenspeed", "vllm"): TYPES[name] for name in shared}
    expected |= {f"vllm:{old}": TYPES[f"tokenspeed:{new}"] for old, new in FORMER.items()}
    assert types(text) == TYPES | expected
    ours, theirs = samples(text, "tokenspeed:"), samples(text, "vllm:")
    former = {key: value for key, value in theirs.items() if key[0].startswith(tuple(FORMER))}
    assert theirs == {key: ours[key] for key in theirs if key not in former} | former
    for (name, labels), value in former.items():
        (old,) = (each for each in FORMER if name.startswith(each))
        assert ours[name.replace(old, FORMER[old]), labels] == value
    lines = [line for line in text.splitlines() if line.startswith("vllm:")]
    assert lines and all('engine="0"' in line and 'model_name="m"' in line for line in lines)
    assert 'vllm:num_requests_running{engine="0",model_name="m"} 3.0' in lines


async def test_times_and_sizes_of_requests(ask: Asker) -> None:
    ask.engine.timing = QUEUED
    await ask.completion(prompt=["Hi", "there"], n=2, max_tokens=4)
    await ask.completion(prompt="Hi", max_tokens=100)
    found = samples((await ask.http.get("/metrics")).text, "tokenspeed:")
    label = (("model_name", "m"),)
    num_answer = len(ask.engine.answer.encode()) + 1
    for name, count, total in (
        ("request_queue_time_seconds", 5, 5 * 0.25),
        ("request_prefill_time_seconds", 5, 5 * 0.5),
        ("request_prompt_tokens", 5, 2 * 2 + 2 * 5 + 2),
        ("request_generation_tokens", 5, 4 * 4 + num_answer),
        ("request_params_max_tokens", 5, 4 * 4 + 100),
        ("request_params_n", 3, 2 + 2 + 1),
        ("request_max_num_generation_tokens", 3, 4 + 4 + num_answer),
    ):
        assert found[f"{name}_count", label] == count, name
        assert found[f"{name}_sum", label] == pytest.approx(total), name
    for name in (
        "time_to_first_token_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
        "request_inference_time_seconds",
        "e2e_request_latency_seconds",
    ):
        assert found[f"{name}_count", label] == 5, name
    assert found["inter_token_latency_seconds_count", label] == 4 * 3 + num_answer - 1
    http = (("method", "POST"), ("path", "/v1/completions"))
    assert found["http_request_duration_seconds_count", http] == 2
    latency = found["e2e_request_latency_seconds_sum", label]
    inference = found["request_inference_time_seconds_sum", label]
    assert inference == pytest.approx(latency - 5 * 0.25)


async def test_steps_are_observed_as_they_come(ask: Asker) -> None:
    told = ask.engine.on_stats
    told(Stats(), Stats(steps=1, scheduled_tokens=7))
    told(Stats(steps=1, scheduled_tokens=7), Stats(steps=1, scheduled_tokens=7))
    told(Stats(steps=1, scheduled_tokens=7), Stats(steps=3, scheduled_tokens=9))
    found = samples((await ask.http.get("/metrics")).text, "tokenspeed:")
    label = (("model_name", "m"),)
    assert found["iteration_tokens_total_count", label] == 3
    assert found["iteration_tokens_total_sum", label] == 9


@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0, 1.5, 9.0]), st.integers(0, 5))))
def test_a_value_may_be_counted_several_times(values: list[tuple[float, int]]) -> None:
    fast, slow = (
        RepeatingHistogram("x", "x", registry=CollectorRegistry(), buckets=(0.5, 1.0))
        for _ in range(2)
    )
    for value, count in values:
        fast.observe_times(value, count)
        for _ in range(count):
            slow.observe(value)

    def shown(histogram: RepeatingHistogram) -> list[tuple[str, dict[str, str], float]]:
        (metric,) = histogram.collect()
        return [each[:3] for each in metric.samples if not each.name.endswith("_created")]

    assert shown(fast) == shown(slow)


async def test_an_engine_that_hangs_shows_it(ask: Asker) -> None:
    pattern = re.compile(r"^tokenspeed:step_age_seconds (\S+)$", re.MULTILINE)

    async def age() -> float:
        match = pattern.search((await ask.http.get("/metrics")).text)
        assert match
        return float(match[1])

    ask.engine.stats_at -= 1000.0
    assert await age() == 0.0
    ask.engine.stats = Stats(num_running=1)
    assert await age() >= 1000.0
    ask.engine.stats = Stats()
