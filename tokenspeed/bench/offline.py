"""What `tokenspeed bench latency` and `throughput` do: an engine in this process, timed.

Other options than a user gave: no prefix reuse, no tokenizer, and as many requests at once as the
largest workload has (256 at most).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenspeed.bench import result_file
from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.bench.workloads import DECODE_MS, HostTime, Result, Seconds, Workload, measure
from tokenspeed.llm import LLM
from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target
from tokenspeed.request import InvalidRequest, SamplingParams
from tokenspeed.text.errors import ModelError

MAX_NUM_SEQS = 256


def offline(
    settings: Mapping[str, Any],
    workloads: Sequence[Workload],
    *,
    command: str,
    num_iters: int,
    path: Path | None,
    as_json: bool,
) -> int:
    """Measure with these options (by name), print, write; the exit status. Raises ConfigError for
    settings or a model that cannot be taken.
    """
    if path is not None:
        check_target("--output-json", path)
    on_gpu = settings.get("device", "auto") != "cpu" and torch.cuda.is_available()
    speed = gpu_speed() if on_gpu else {}
    began = time.perf_counter()
    try:
        llm = make_llm(settings, workloads)
    except (ModelError, ConfigError, InvalidRequest) as error:
        raise ConfigError(str(error)) from error
    ready = llm.engine.ready
    report: dict[str, Any] = {
        "machine": facts() | speed,
        "engine": ready.summary,
        "ready_s": time.perf_counter() - began,
        "results": [],
    }
    out = sys.stderr if as_json else sys.stdout
    print(f"{ready.summary}; medians of {num_iters}", file=out)
    for result in run(llm, workloads, num_iters):
        report["results"].append(msgspec.to_builtins(result))
        print(line(result), file=out, flush=True)
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    if as_json:
        print(encoded)
    if path is not None and not result_file.write(command, path, f"{encoded}\n".encode()):
        return 1
    return 0


def make_llm(settings: Mapping[str, Any], workloads: Sequence[Workload]) -> LLM:
    """The engine to be timed. Raises what LLM raises."""
    rows = max(each.num_prompts for each in workloads)
    options: dict[str, Any] = {
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "max_num_seqs": min(rows, MAX_NUM_SEQS),
    }
    return LLM(**{**options, **settings})


def run(llm: LLM, workloads: Sequence[Workload], num_iters: int) -> Iterator[Result]:
    """The results as they come; a workload that is too long for the model is left out, and said."""
    fitting = []
    for each in workloads:
        if each.total_len <= llm.max_model_len:
            fitting.append(each)
        else:
            told = f"{each.name}: left out, its {each.total_len} tokens are more than the model's"
            print(f"{told} context of {llm.max_model_len}", file=sys.stderr)
    vocab_size = llm.engine.ready.vocab_size
    yield from measure(fitting, seconds_of(llm), vocab_size, num_iters, host_time_of(llm))


def seconds_of(llm: LLM) -> Seconds:
    """An engine as the workloads know one."""

    def seconds(ids: list[list[int]], count: int) -> float:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        llm.generate(ids, params, use_tqdm=False)
        return time.perf_counter() - began

    return seconds


def host_time_of(llm: LLM) -> HostTime:
    def host_time() -> float:
        stats = llm.engine.stats
        return stats.host_launch_s + stats.host_commit_s

    return host_time


def line(result: Result) -> str:
    """A result for people; of steps also as tokens a second."""
    spread = f"({min(result.runs):.4g} to {max(result.runs):.4g})"
    shown = f"{result.name:12} {result.median:12.3f} {result.unit:16} {spread}"
    if result.unit == DECODE_MS:
        shown += f"   {1e3 * result.num_prompts / result.median:.0f} tokens/s"
    if result.host_ms is not None:
        shown += f"   host {result.host_ms:.3f} ms"
    return shown
