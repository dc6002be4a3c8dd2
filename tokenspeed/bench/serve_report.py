"""The result of `bench serve` as the text and the JSON that scripts for vLLM's benchmark read."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.bench.answer import Record
from tokenspeed.bench.metrics import Summary
from tokenspeed.bench.serve_options import ServeOptions

_WIDTH = 50
_TITLES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


def text(summary: Summary, options: ServeOptions, shown: Sequence[str]) -> str:
    """The block for people; `shown` are the times in it."""
    lines = [" Serving Benchmark Result ".center(_WIDTH, "=")]
    lines += [_row(label, value) for label, value in _figures(summary, options)]
    for name in shown:
        if name not in summary.times:
            continue
        spread, short = summary.times[name], name.upper()
        lines.append(_TITLES[name].center(_WIDTH, "-"))
        lines.append(_row(f"Mean {short} (ms):", spread.mean))
        lines.append(_row(f"Median {short} (ms):", spread.median))
        lines += [_row(f"P{p:g} {short} (ms):", value) for p, value in spread.percentiles]
    lines.append("=" * _WIDTH)
    return "\n".join(lines)


def notes(summary: Summary, records: Sequence[Record], client_share: float) -> list[str]:
    """What a reader of the figures must know: failures by kind, how tokens were counted, whether
    the client was the limit.
    """
    found = []
    for kind, count in sorted(summary.failures.items()):
        example = next(record.detail for record in records if record.failure == kind)
        found.append(f"failed: {count} x {kind}, such as: {' '.join(example.split())[:200]}")
    if summary.num_counted_by_chunks:
        found.append(
            f"{summary.num_counted_by_chunks} answers had no usage: their chunks were counted as "
            "tokens"
        )
    if client_share > 0.9:
        found.append(
            f"this client used {100 * client_share:.0f}% of its core: figures may be its own"
        )
    return found


def as_json(
    summary: Summary, options: ServeOptions, model: str, client_share: float
) -> dict[str, Any]:
    """Keys as those of vLLM's result, and ours beside them."""
    load = options.load
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": options.target.backend,
        "endpoint": options.endpoint,
        "model_id": model,
        "dataset_name": options.dataset.dataset_name,
        "num_prompts": options.dataset.num_prompts,
        "request_rate": "inf" if math.isinf(load.request_rate) else load.request_rate,
        "burstiness": "inf" if math.isinf(load.burstiness) else load.burstiness,
        "max_concurrency": load.max_concurrency,
        "random_input_len": options.dataset.random_input_len,
        "random_output_len": options.dataset.random_output_len,
        **dict(_pair(each) for each in options.output.metadata),
        "duration": summary.duration,
        "completed": summary.completed,
        "failed": summary.failed,
        "failures": summary.failures,
        "total_input_tokens": summary.total_input_tokens,
        "total_output_tokens": summary.total_output_tokens,
        "num_counted_by_chunks": summary.num_counted_by_chunks,
        "request_throughput": summary.rate(summary.completed),
        "request_goodput": None if summary.num_good is None else summary.rate(summary.num_good),
        "output_throughput": summary.rate(summary.total_output_tokens),
        "total_token_throughput": summary.rate(
            summary.total_input_tokens + summary.total_output_tokens
        ),
        "max_output_tokens_per_s": summary.peak_output_tokens_per_s,
        "max_concurrent_requests": summary.peak_concurrency,
        "client_cpu_share": client_share,
    }
    for name, spread in summary.times.items():
        result |= {f"{key}_{name}_ms": getattr(spread, key) for key in ("mean", "median", "std")}
        result |= {f"p{p:g}_{name}_ms": value for p, value in spread.percentiles}
    return result


def path(options: ServeOptions, model: str) -> Path | None:
    """Where the result is to be written, if anywhere."""
    output = options.output
    if output.output_json is None and not output.save_result:
        return None
    rate = "inf" if math.isinf(options.load.request_rate) else f"{options.load.request_rate:g}"
    parts = [options.target.backend, f"{rate}qps", model.replace("/", "-")]
    name = "-".join([*parts, time.strftime("%Y%m%d-%H%M%S")]) + ".json"
    return Path(output.result_dir, output.output_json or name)


def details(records: Sequence[Record]) -> dict[str, Any]:
    """What `--save-detailed` adds: lists as vLLM has them, and each record whole."""
    ordered = sorted(records, key=lambda record: record.start)
    return {
        "input_lens": [record.input_len for record in ordered],
        "output_lens": [record.output_len for record in ordered],
        "ttfts": [record.ttft for record in ordered],
        "itls": [record.itls for record in ordered],
        "generated_texts": [record.text for record in ordered],
        "errors": [f"{each.failure}: {each.detail}" if each.failure else "" for each in ordered],
        "requests": [msgspec.to_builtins(record) for record in ordered],
    }


def _figures(summary: Summary, options: ServeOptions) -> list[tuple[str, float | int]]:
    """Labels and values; a label's unit stands in it."""
    rows: list[tuple[str, float | int]] = [
        ("Successful requests:", summary.completed),
        ("Failed requests:", summary.failed),
    ]
    if options.load.max_concurrency is not None:
        rows.append(("Maximum request concurrency:", options.load.max_concurrency))
    if not math.isinf(options.load.request_rate):
        rows.append(("Request rate configured (RPS):", options.load.request_rate))
    rows += [
        ("Benchmark duration (s):", summary.duration),
        ("Total input tokens:", summary.total_input_tokens),
        ("Total generated tokens:", summary.total_output_tokens),
        ("Request throughput (req/s):", summary.rate(summary.completed)),
    ]
    if summary.num_good is not None:
        rows.append(("Request goodput (req/s):", summary.rate(summary.num_good)))
    total = summary.total_input_tokens + summary.total_output_tokens
    rows += [
        ("Output token throughput (tok/s):", summary.rate(summary.total_output_tokens)),
        ("Peak output token throughput (tok/s):", summary.peak_output_tokens_per_s),
        ("Peak concurrent requests:", summary.peak_concurrency),
        ("Total Token throughput (tok/s):", summary.rate(total)),
    ]
    return rows


def _row(label: str, value: float) -> str:
    shown = str(value) if isinstance(value, int) else f"{value:.2f}"
    return f"{label:<40} {shown:<10}".rstrip()


def _pair(text: str) -> tuple[str, str]:
    key, _, value = text.partition("=")
    return key, value
