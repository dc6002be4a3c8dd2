"""What a cold compile costs, and that it does not grow with depth.

    python benchmarks/cold_compile.py [--depths 4 64] [--rounds 5] [--out RESULT.json]

Each measurement is a fresh process with an empty cache and one thread: SmolLM2-135M's widths, no
weights, float32 on a CPU. Counted are CPU-seconds of the process and of the compilers that it runs,
so that the machine need not be idle, by phase: imports (of Dynamo and Inductor), capture (with its
passes and the split), inductor (with the passes over pieces), compile (these two and the writing of
the entry). Rounds are interleaved, every other one backwards. Printed are medians with the range,
and the deepest compile over the shallowest: `ratio` is that of the medians.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tokenspeed.bench.machine import facts
from tokenspeed.compile import receipt
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import RECEIPT
from tokenspeed.compile.key import Target, facts_of
from tokenspeed.compile.ranges import token_ranges
from tokenspeed.compile.receipt import cpu_seconds
from tokenspeed.models import family_of
from tokenspeed.resolve import RANGES

WIDTHS = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
PHASES = ("imports", "capture", "inductor", "compile")


def measure(depth: int, folder: Path) -> dict[str, Any]:
    """In a fresh process: compile the model into `folder`."""
    before = cpu_seconds()
    compile_model = importlib.import_module("tokenspeed.compile.cold").compile_model
    imports, began, before = cpu_seconds() - before, time.monotonic(), cpu_seconds()
    hf_config = WIDTHS | {"num_hidden_layers": depth}
    family = family_of(hf_config)
    config = family.config.from_dict(hf_config)
    target = Target(
        model=family.model,
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranges=token_ranges(RANGES["cpu"]),
    )
    entry = CompileCache(folder).store(
        facts_of(target),
        "benchmark",
        lambda build: compile_model(
            lambda: family.model(config), target, build, lambda detail: None
        ),
    )
    done = receipt.decode(entry.files[RECEIPT])
    return {
        "imports": imports,
        **done.cpu_seconds,
        "compile": cpu_seconds() - before,
        "wall": time.monotonic() - began,
        "pieces": len(done.pieces),
        "matches": done.totals(),
        "bytes": sum(map(len, entry.files.values())),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def measure_fresh(depth: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        command = [sys.executable, __file__, "--measure", str(depth), folder]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=env)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(depths: list[int], rounds: int) -> dict[str, Any]:
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in depths}
    for number in range(rounds):
        for depth in depths[:: -1 if number % 2 else 1]:
            runs[depth].append(measure_fresh(depth))
    medians = {
        depth: {phase: statistics.median(run[phase] for run in each) for phase in PHASES}
        for depth, each in runs.items()
    }
    few, many = min(depths), max(depths)
    pairs = zip(runs[many], runs[few], strict=True)
    return {
        "machine": facts(threads=1),
        "ratio": medians[many]["compile"] / medians[few]["compile"],
        "ratios_by_round": [deep["compile"] / shallow["compile"] for deep, shallow in pairs],
        "medians": medians,
        "runs": runs,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(int(args.measure[0]), Path(args.measure[1]))))
        return
    report = compare(args.depths, args.rounds)
    print(f"{'layers':>6} " + " ".join(f"{phase:>20}" for phase in PHASES))
    for depth, each in report["runs"].items():
        cells = []
        for phase in PHASES:
            median, values = report["medians"][depth][phase], [run[phase] for run in each]
            cells.append(f"{median:.2f} ({min(values):.2f}-{max(values):.2f})")
        print(f"{depth:6} " + " ".join(f"{cell:>20}" for cell in cells))
    low, high = min(report["ratios_by_round"]), max(report["ratios_by_round"])
    few, many = min(args.depths), max(args.depths)
    print(f"{many} layers cost {report['ratio']:.3f} ({low:.3f}-{high:.3f}) x {few} layers")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
