"""Compiled pieces on a GPU: cold, from the cache in another process, and beside eager pieces.

    python benchmarks/gpu_pieces.py CONFIG_FOLDER [CONFIG_FOLDER ...] [--out RESULT.json]

For each model (dummy weights in bfloat16), in fresh processes with empty Inductor and Triton
folders:

    cold    an empty cache: compiled by a child process
    warm    the cache that cold left: no Dynamo frame, nothing compiled
    eager   -O0

Each process runs the three functions (embed, forward, head) with an attention that returns its
queries, for every T in 1..300 and a spread up to 8192, counts compiles of Inductor and Triton after
the first call, hashes the outputs, and times steps in a CUDA graph: one token step is embed,
forward, head and argmax. Attention is not in these numbers. cold and warm must agree bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from tokenspeed.batch import forward_context
from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config, make_config
from tokenspeed.engine.model import ServedModel, resolve_served
from tokenspeed.engine.program import obtain_program
from tokenspeed.loader import empty_model, load_weights

TIMED = (1, 8, 64, 256)
HASHED = (1, 2, 7, 64, 255, 256, 257, 1000, 4096, 8192)
SWEPT = (*range(1, 301), *range(301, 8193, 397), 511, 512, 513, 2048, 8191, 8192)
REPEATS = 20


class Passthrough:
    """An attention that costs nothing."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        return q


def build(config: Config) -> tuple[Executable, ServedModel, str]:
    model = resolve_served(config, need_weights=False)
    with obtain_program(model, config) as pending:
        module = empty_model(model.make, model.dtype, model.device)
        load_weights(
            module, model.family.weights, model.source, load_format="dummy", seed=config.model.seed
        )
        obtained = pending.result(lambda phase, detail: None)
    return Executable(obtained.program, module), model, obtained.level


def step(executable: Executable, ids: Tensor, positions: Tensor) -> Tensor:
    hidden = executable.forward(executable.embed(ids), positions)
    return executable.head(hidden).argmax(-1)


def inputs(count: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    positions = torch.arange(count, device="cuda")
    return positions * 7919 % vocab_size, positions


def compile_counts() -> dict[str, Any]:
    frames = None
    if "torch._dynamo.utils" in sys.modules:
        frames = dict(sys.modules["torch._dynamo.utils"].counters["frames"])
    return {"triton_compiles": len(_compiled), "dynamo_frames": frames}


_compiled: list[str] = []


def _count_triton() -> None:
    def listener(**facts: Any) -> None:
        _compiled.append(str(facts.get("src", "")))

    triton.knobs.compilation.listener = listener


def hash_of(executable: Executable, count: int, vocab_size: int) -> str:
    ids, positions = inputs(count, vocab_size)
    hidden = executable.forward(executable.embed(ids), positions)
    assert torch.isfinite(hidden).all(), f"T = {count}: not finite"
    return hashlib.sha256(hidden.view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]


def timed_ms(executable: Executable, count: int, vocab_size: int) -> float:
    """Milliseconds of a step in a CUDA graph: the median of `REPEATS` replays."""
    ids, positions = inputs(count, vocab_size)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            step(executable, ids, positions)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(executable, ids, positions)
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


@torch.inference_mode()
def run(folder: str, level: int, cache: str) -> dict[str, Any]:
    """One process's part."""
    _count_triton()
    began = time.perf_counter()
    options = {"model": folder, "level": level, "cache_dir": cache, "device": "cuda"}
    config = make_config({**options, "load_format": "dummy", "skip_tokenizer_init": True})
    executable, model, how = build(config)
    ready = time.perf_counter() - began
    vocab_size = model.config.vocab_size
    with forward_context(Passthrough()):
        hash_of(executable, 1, vocab_size), hash_of(executable, 8192, vocab_size)
        first = time.perf_counter() - began
        before = compile_counts()
        for count in SWEPT:
            ids, positions = inputs(count, vocab_size)
            executable.forward(executable.embed(ids), positions)
        torch.cuda.synchronize()
        after = compile_counts()
        hashes = {count: hash_of(executable, count, vocab_size) for count in HASHED}
        step_ms = {count: timed_ms(executable, count, vocab_size) for count in TIMED}
    return {
        "level": how,
        "ready_s": ready,
        "first_calls_s": first - ready,
        "compiles_in_sweep": after["triton_compiles"] - before["triton_compiles"],
        "compiles_before": before,
        "dynamo_frames": after["dynamo_frames"],
        "inductor_imported": "torch._inductor.compile_fx" in sys.modules,
        "hashes": hashes,
        "step_ms": step_ms,
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def receipt(cache: Path) -> dict[str, Any]:
    """What the passes did, by piece and range, and how long each phase took."""
    (entry,) = (cache / "v1").glob("[!.]*")
    data = json.loads((entry / "receipts" / "counts.json").read_text())
    pieces = {
        f"{piece[:8]} {name}": {
            each["name"]: [each["matched"], each.get("expected")]
            for each in reports
            if each.get("matched")
        }
        for piece, ranges in data["pieces"].items()
        for name, reports in ranges.items()
    }
    plan = json.loads((entry / "plan.json").read_text())
    distinct = {row["piece"] for row in plan["forward"]["rows"] if row["type"] == "piece"}
    size = sum(path.stat().st_size for path in entry.rglob("*") if path.is_file())
    return {
        "distinct_forward_pieces": len(distinct),
        "forward_rows": len(plan["forward"]["rows"]),
        "matches": pieces,
        "seconds": data["seconds"],
        "entry_bytes": size,
    }


def in_fresh_process(folder: str, level: int, cache: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        names = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        env = os.environ | {name: str(Path(empty, name)) for name in names}
        command = [sys.executable, __file__, folder, "--level", str(level), "--cache", str(cache)]
        began = time.monotonic()
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {"process_s": time.monotonic() - began, **result}


def compare(folder: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as root:
        cache = Path(root, "cache")
        cold = in_fresh_process(folder, 1, cache)
        warm = in_fresh_process(folder, 1, cache)
        made = receipt(cache)
        eager = in_fresh_process(folder, 0, Path(root, "none"))
    agree = cold["hashes"] == warm["hashes"]
    return {"cold": cold, "warm": warm, "eager": eager, "entry": made, "warm_equals_cold": agree}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--level", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.level is not None:
        print(json.dumps(run(args.folders[0], args.level, args.cache)))
        return
    report = {
        "machine": facts() | gpu_speed(),
        "models": {Path(f).name: compare(f) for f in args.folders},
    }
    print(json.dumps(report, indent=1))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
