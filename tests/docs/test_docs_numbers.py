"""The figures in the README are those in benchmarks/results/, as far as their digits go."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from code_in_documents import ROOT

README = (ROOT / "README.md").read_text()
NUMBER = r"(\d+(?:\.\d+)?k?)"


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
    return found


def cells(title: str) -> list[str]:
    """Of the row of a table that begins with `title`."""
    (row,) = re.findall(rf"^\| {re.escape(title)} \|(.*)\|$", README, re.MULTILINE)
    return [cell.strip() for cell in row.split("|")]


def told(pattern: str) -> list[str]:
    """The numbers of a sentence."""
    (found,) = re.findall(pattern.replace("N", NUMBER), " ".join(README.split()))
    return [found] if isinstance(found, str) else list(found)


def rounds_to(value: float, shown: str) -> bool:
    digits, scale = shown.rstrip("k"), 1000 if shown.endswith("k") else 1
    unit = scale * 10.0 ** -len(digits.partition(".")[2])
    return abs(float(digits) * scale - value) <= unit / 2 * (1 + 1e-9)


def test_digits_are_compared() -> None:
    assert rounds_to(380509.2, "381k") and rounds_to(6.25, "6.2") and rounds_to(6.25, "6.3")
    assert not rounds_to(380499.0, "381k") and not rounds_to(3.94, "3.95")


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("decode, 1 request", "decode1"),
        ("decode, 8 requests together", "decode8"),
        ("prompt of 512 tokens", "prefill"),
    ],
)
def test_figures_of_a_cpu(title: str, name: str) -> None:
    measured = result("cpu_peers.json")["results"][name]
    *engines, ratio = cells(title)
    assert rounds_to(measured["ratio"], ratio)
    for engine, cell in zip(("tokenspeed", "transformers"), engines, strict=True):
        shown = re.findall(NUMBER, cell)
        for kind, each in zip(("median", "min", "max"), shown, strict=True):
            assert rounds_to(measured[engine][kind], each), (engine, kind)


@pytest.mark.parametrize(
    ("title", "name"),
    [
        ("decode, batch 1, ms a step", "decode1"),
        ("batch 8", "decode8"),
        ("batch 64", "decode64"),
        ("batch 256", "decode256"),
        ("first token, prompt of 128, ms", "ttft128"),
        ("first token, prompt of 8192, ms", "ttft8192"),
        ("32 prompts of 4096, tokens/s", "prefill"),
        ("256 requests, 1024 in, 256 out, tokens/s", "mixed"),
    ],
)
def test_figures_of_a_gpu(title: str, name: str) -> None:
    shown = cells(title)
    for model, (figure, ratio) in {"0.6b": shown[:2], "8b": shown[2:]}.items():
        measured = result(f"gpu_engine_qwen3-{model}.json")["results"]
        assert rounds_to(measured[name], figure), model
        assert rounds_to(measured[f"{name}_ratio"], ratio), model


def test_figures_of_servers_on_a_gpu() -> None:
    first = result("gpu_first_token_qwen3-8b.json")
    shown = told(r"first_token.py`\): N s with an empty compile cache, N s with a filled one")
    assert all(map(rounds_to, (first[kind]["first_token_s"] for kind in ("cold", "warm")), shown))
    streams = result("gpu_http_streams_qwen3-8b.json")
    shown = told(
        r"get N of the tokens/s of the engine offline, N ms after the engine .* \(median; N ms at"
    )
    delays = streams["delay_ms"]
    values = (streams["delivered_ratio"], delays["p50"], delays["p99"])
    assert all(map(rounds_to, values, shown))
    shown = told(r"first token N times sooner with the prefix cache \(8B; N times with the 0.6B")
    speedups = [result(f"gpu_prefix_ttft_qwen3-{size}.json")["speedup"] for size in ("8b", "0.6b")]
    assert all(map(rounds_to, speedups, shown))
    (shown,) = told(r"GPU works N % of the time")
    assert rounds_to(100 * result("gpu_busy_qwen3-8b.json")["decode"]["busy_share"], shown)


def test_figures_in_sentences() -> None:
    memory = result("cpu_peers.json")["memory"]
    shown = told(
        r"grows by N MiB, N times float32 weights and KV pool; that of transformers by N MiB"
    )
    grown = memory["grown_mib"]
    values = (grown["tokenspeed"], memory["ratio"], grown["transformers"])
    assert all(map(rounds_to, values, shown))
    medians = result("start.json")["medians_s"]
    shown = told(r"to ready, there: N s, compiled pieces and all, against N s at")
    assert all(map(rounds_to, (medians["warm"], medians["eager"]), shown))
    (shown,) = told(r"compiles in N times the CPU-seconds of one of 4 layers")
    assert rounds_to(result("cold_compile.json")["ratio"], shown)
