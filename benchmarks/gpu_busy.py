"""How much of the time the GPU works while a full batch decodes.

    python benchmarks/gpu_busy.py CONFIG_FOLDER [--batch 256] [--steps 200] [--input-len 128]
                                  [--option name=value] [--out RESULT.json]

Dummy weights. After all prompts and some steps, the profiler records the device for so many steps
of the engine: busy is the union of all kernels, copies and fills, as a share of the time from the
first one's begin to the last one's end. The steps are also timed without the profiler, which may
only make them slower.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
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


def busy(engine: Engine, count: int) -> dict[str, Any]:
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        profiled = step_ms(engine, count)
        torch.cuda.synchronize()
    on_device = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    begin, end = min(on_device)[0], max(span[1] for span in on_device)
    return {
        "busy_share": union_us(on_device) / (end - begin),
        "step_ms_profiled": statistics.median(profiled),
        "device_ms_a_step": (end - begin) / 1e3 / count,
        "launches_a_step": len(on_device) / count,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--option", action="append", default=[], help="name=value of an LLM option")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = {name: typed(value) for name, value in (each.split("=", 1) for each in args.option)}
    own = {"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False}
    max_tokens = 2 * (args.steps + SETTLED) + args.batch
    own |= {"max_num_seqs": args.batch, "max_model_len": args.input_len + max_tokens}
    with LLM(args.folder, **{**own, **options}) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        for at, ids in enumerate(prompts(args.batch, args.input_len, engine.ready.vocab_size)):
            engine.add(GenerateRequest(id=str(at), prompt_ids=ids, params=params))
        while engine.stats.num_running < args.batch or engine.stats.num_waiting:
            engine.step()
        step_ms(engine, SETTLED)
        report = {"plain_step_ms": statistics.median(step_ms(engine, args.steps))}
        report |= busy(engine, args.steps)
        engine.abort([str(at) for at in range(args.batch)])
        while engine.has_work:
            engine.step()
    report = {"machine": facts(), "model": Path(args.folder).name, "batch": args.batch} | report
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
