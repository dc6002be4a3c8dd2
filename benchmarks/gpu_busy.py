"""What the GPU does in a step: how much of the time it works, and with which kernels.

    python benchmarks/gpu_busy.py CONFIG_FOLDER [--batch 256] [--steps 200] [--input-len 128]
                                  [--prompts 4] [--prompt-len 8192]
                                  [--option name=value] [--out RESULT.json]

Dummy weights. The profiler records the device twice: for steps of a full batch that decodes, after
all its prompts and some steps more; and for prompts one after the other. Busy is the union of all
kernels, copies and fills, as a share of the time from the first one's begin to the last one's end.
`kernels` are those that take most, by name: launches and microseconds a step. The decode steps are
also timed without the profiler, which may only make them slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from burst import typed
from torch.profiler import ProfilerActivity, profile

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.machine import facts
from tokenspeed.bench.workloads import prompts
from tokenspeed.engine.engine import Engine
from tokenspeed.request import GenerateRequest

SETTLED = 16
"""Steps that are not counted."""

NAME_LEN, MOST = 80, 24


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """Microseconds that spans (begin, end) cover together."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total


def step_ms(engine: Engine, count: int) -> list[float]:
    found = []
    for _ in range(count):
        began = time.perf_counter()
        engine.step()
        found.append(1e3 * (time.perf_counter() - began))
    return found


def busy(run: Callable[[], int]) -> dict[str, Any]:
    """Of what `run` does, which returns how many steps that was."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        count = run()
        torch.cuda.synchronize()
    events = [
        event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    spans = [(event.time_range.start, event.time_range.end) for event in events]
    begin, end = min(spans)[0], max(span[1] for span in spans)
    by_name: dict[str, list[float]] = {}
    for event, span in zip(events, spans, strict=True):
        by_name.setdefault(event.name[:NAME_LEN], []).append(span[1] - span[0])
    longest = sorted(by_name.items(), key=lambda pair: -sum(pair[1]))[:MOST]
    return {
        "busy_share": union_us(spans) / (end - begin),
        "device_ms_a_step": (end - begin) / 1e3 / count,
        "launches_a_step": len(spans) / count,
        "kernels": [
            {"name": name, "launches": len(took) / count, "us": sum(took) / count}
            for name, took in longest
        ],
    }


def add(engine: Engine, count: int, length: int, max_tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for at, ids in enumerate(prompts(count, length, engine.ready.vocab_size)):
        engine.add(GenerateRequest(id=str(at), prompt_ids=ids, params=params))


def decode(engine: Engine, batch: int, input_len: int, steps: int) -> dict[str, Any]:
    add(engine, batch, input_len, 2 * (steps + SETTLED) + batch)
    while engine.stats.num_running < batch or engine.stats.num_waiting:
        engine.step()
    step_ms(engine, SETTLED)
    found = {"plain_step_ms": statistics.median(step_ms(engine, steps))}
    found |= busy(lambda: len(step_ms(engine, steps)))
    engine.abort([str(at) for at in range(batch)])
    while engine.has_work:
        engine.step()
    return found


def prefill(engine: Engine, count: int, length: int) -> dict[str, Any]:
    """A step is a prompt."""

    def run() -> int:
        add(engine, count, length, 1)
        while engine.has_work:
            engine.step()
        return count

    run()
    return busy(run)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--prompts", type=int, default=4, help="0: none")
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--option", action="append", default=[], help="name=value of an LLM option")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = {name: typed(value) for name, value in (each.split("=", 1) for each in args.option)}
    own = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    longest = args.input_len + 2 * (args.steps + SETTLED) + args.batch
    own |= {"max_num_seqs": args.batch, "max_model_len": max(longest, args.prompt_len + 1)}
    with LLM(args.folder, **{**own, **options}) as llm:
        report = {"decode": decode(llm.engine, args.batch, args.input_len, args.steps)}
        if args.prompts:
            report["prefill"] = prefill(llm.engine, args.prompts, args.prompt_len)
    report = {"machine": facts(), "model": Path(args.folder).name, "batch": args.batch} | report
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
