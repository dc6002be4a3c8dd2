"""The size of the pool, and what a start tells of itself."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from engine_tiny import tiny_config, tiny_engine

from tokenspeed import spans
from tokenspeed.compile import pipeline
from tokenspeed.config import CacheConfig
from tokenspeed.engine import memory
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.memory import available_ram, count_pages
from tokenspeed.options import ConfigError

CPU = torch.device("cpu")
GIB = 1 << 30


def test_pool_size_as_asked_or_as_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_ram", lambda: 2 * GIB)

    def pages(useful: int, page_bytes: int, **cache: float) -> int:
        return count_pages(
            CacheConfig(**cache),
            page_bytes,
            useful_tokens=useful,
            needed_tokens=1,
            device=CPU,
        )

    assert pages(1000, 1024, max_total_tokens=100) == 7  # of 16: never fewer tokens than asked
    assert pages(1000, 1024) == 63  # no more than can be used
    assert pages(1 << 40, 1 << 20, gpu_memory_utilization=0.5) == 1024
    monkeypatch.setattr(memory, "available_ram", lambda: 1 << 50)
    assert pages(1 << 40, 1 << 20) == 4096


def test_a_pool_that_cannot_do_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_ram", lambda: 10 << 20)
    cache = CacheConfig(gpu_memory_utilization=0.4)
    with pytest.raises(ConfigError) as caught:
        count_pages(cache, 1 << 20, useful_tokens=1000, needed_tokens=100, device=CPU)
    assert str(caught.value) == (
        "the KV cache needs 112 tokens (7 MiB) for one request of full length, but has 64 "
        "(4 MiB of memory for it); lower --max-model-len to 64 or give it more with "
        "--max-total-tokens or --gpu-memory-utilization"
    )
    with pytest.raises(ConfigError, match=r"has 0 .* MiB of memory"):
        count_pages(CacheConfig(), 1 << 60, useful_tokens=1, needed_tokens=1, device=CPU)


def test_free_memory_is_the_machine_s_or_the_cgroup_s(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    assert available_ram(tmp_path) == 5000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("1000\n")
    (group / "memory.max").write_text("max\n")
    assert available_ram(tmp_path) == 5000 * 1024
    (group / "memory.max").write_text("4000\n")
    assert available_ram(tmp_path) == 3000
    (group / "memory.stat").write_text("anon 100\ninactive_file 700\nactive_file 200\n")
    assert available_ram(tmp_path) == 3700, "cached files are given back before memory is short"
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text("1:name=x:/other\n0::/outer/inner\n")
    (group / "outer/inner").mkdir(parents=True)
    (group / "outer/memory.max").write_text("2000\n")
    (group / "outer/memory.current").write_text("500\n")
    (group / "outer/inner/memory.max").write_text("max\n")
    assert available_ram(tmp_path) == 1500, "the tightest of all cgroups around us"
    (group / "memory.max").write_text("200\n")
    assert available_ram(tmp_path) == 0


def test_a_start_reports_phases_and_spans(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spans, "_enabled", True)
    monkeypatch.setattr(pipeline, "plan_model", inspect.unwrap(pipeline.plan_model))  # not shared
    caplog.set_level(logging.INFO, logger="tokenspeed")
    reports: list[tuple[str, str]] = []
    engine = build_engine(tiny_config(tiny_model, level=0), lambda *report: reports.append(report))
    phases = [phase for phase, _ in reports]
    assert list(dict.fromkeys(phases)) == ["config", "weights", "compile", "kv"]
    assert ("weights", "0 of 0 MiB") in reports
    lines = [each.getMessage() for each in caplog.records if each.name == "tokenspeed"]
    records = [json.loads(line.removeprefix("startup_timing ")) for line in lines if "{" in line]
    ended = {each["phase"]: each["status"] for each in records if each["event"] == "end"}
    assert ended == dict.fromkeys(
        [
            *("scheduler.init", "model.config", "compile.capture", "compile.split"),
            *("weights.target", "weights.allocate", "weights.read_copy"),
            *("kv.build", "process.import", "executor.init"),
            *("model.source", "compile.skeleton"),
        ],
        "ok",
    )
    summaries = [line.split(":")[0].split(" ")[0] for line in lines if "{" not in line]
    assert summaries == ["model", "weights", "program", "kv", "attention", "engine"]
    assert engine.ready.summary.endswith("in float32, level 0, KV cache of 1024 tokens")


def test_a_model_without_an_end_says_so(
    tiny_model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config.pop("eos_token_id")
    (folder / "config.json").write_text(json.dumps(config))
    tiny_engine(str(folder))
    assert "names an end-of-sequence token" in caplog.text
    caplog.clear()
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    (folder / "vocab.json").write_text(json.dumps({"<end>": 7}))
    assert tiny_engine(str(folder))._eos_ids == {7}
    assert "end-of-sequence" not in caplog.text


def test_the_pool_limits_an_open_context_but_not_one_that_was_asked_for(
    tiny_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert tiny_engine(tiny_model, max_total_tokens=60).ready.max_model_len == 60
    assert "limits the context to 60 tokens, of 256 that the model has; --max-total" in caplog.text
    with pytest.raises(ConfigError, match="lower that to 60, or raise this to 61"):
        tiny_engine(tiny_model, max_total_tokens=60, max_model_len=61)
