"""What a cold compile costs, and that it does not grow with depth.

    python benchmarks/cold_compile.py [--depths 4 64] [--rounds 3] [--out RESULT.json]

Each measurement is a fresh process with an empty cache: SmolLM2-135M's widths, no weights, float32
on a CPU. Counted are CPU-seconds of the process and of the compilers that it runs, in all and by
phase: imports (of Dynamo and Inductor), capture (with split), Inductor (with passes). Rounds are
interleaved; printed are medians with the range, and the deepest total over the shallowest.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tokenspeed import __version__
from tokenspeed.compile import receipt
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import RECEIPT
from tokenspeed.compile.key import Target, facts_of
from tokenspeed.compile.ranges import token_ranges
from tokenspeed.models import family_of

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
PHASES = ("imports", "capture", "inductor", "total")


def cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def measure(depth: int, folder: Path) -> dict[str, Any]:
    """In a fresh process: compile the model into `folder`."""
    began, before = time.monotonic(), cpu_seconds()
    compile_model = importlib.import_module("tokenspeed.compile.store").compile_model
    imports = cpu_seconds() - before
    hf_config = WIDTHS | {"num_hidden_layers": depth}
    family = family_of(hf_config)
    config = family.config.from_dict(hf_config)
    target = Target(
        model=family.model,
        config=config,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ranges=token_ranges("cpu", 1),
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
        "total": cpu_seconds() - before,
        "wall": time.monotonic() - began,
        "pieces": len(done.pieces),
        "matches": done.totals(),
        "bytes": sum(map(len, entry.files.values())),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    }


def measure_fresh(depth: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="cold-") as folder:
        command = [sys.executable, __file__, "--measure", str(depth), folder]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(int(args.measure[0]), Path(args.measure[1]))))
        return
    runs: dict[int, list[dict[str, Any]]] = {depth: [] for depth in args.depths}
    for _ in range(args.rounds):
        for depth in args.depths:
            runs[depth].append(measure_fresh(depth))
    medians = {
        depth: {phase: statistics.median(run[phase] for run in each) for phase in PHASES}
        for depth, each in runs.items()
    }
    ratio = medians[max(medians)]["total"] / medians[min(medians)]["total"]
    print(f"{'layers':>6} " + " ".join(f"{phase:>20}" for phase in PHASES))
    for depth, each in runs.items():
        cells = []
        for phase in PHASES:
            values = [run[phase] for run in each]
            cells.append(f"{medians[depth][phase]:.1f} ({min(values):.1f}-{max(values):.1f})")
        print(f"{depth:6} " + " ".join(f"{cell:>20}" for cell in cells))
    print(f"{max(medians)} layers cost {ratio:.2f} x {min(medians)} layers")
    if args.out:
        report = {"machine": machine(), "runs": runs, "medians": medians, "ratio": ratio}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "tokenspeed": __version__,
        "command": " ".join(["python", *sys.argv]),
    }


if __name__ == "__main__":
    main()
