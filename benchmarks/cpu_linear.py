"""Linear layers on a CPU: every kernel by weight shape and token count, and the table they make.

    python benchmarks/cpu_linear.py [--threads 2] [--budget 20] [--out RESULT.json]

Weights have SmolLM2-135M's shapes, all 30 layers of them, in float32. Each sample times some calls
in a row, and the fastest sample counts. All shapes come between two kernels: otherwise the second
would find the head, of which there is one, in the cache. Printed: GB/s of weights and GFLOP/s; then
the sums over a whole model's linear layers, as tokens/s that they alone would allow; then the table
that `tune` measures. Compare kernels within one run only: a shared machine's speed drifts.

To see what another instruction set gives: ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2
MKL_ENABLE_INSTRUCTIONS=AVX2 in the environment.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tokenspeed.kernels import native
from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.linear_cpu_choices import kernels
from tokenspeed.kernels.linear_cpu_tuning import Shape, facts, tune
from tokenspeed.kernels.native import BuildError

LAYERS = 30
SHAPES: dict[str, Shape] = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 512)
SAMPLE_BYTES = 8 << 20

Times = dict[tuple[str, int, str], float]


def count(name: str) -> int:
    return 1 if name == "head" else LAYERS


def measure(
    weights: Mapping[str, list[Tensor]], found: Mapping[str, Linear], budget: float
) -> Times:
    """Seconds a call, by layer, tokens and kernel."""
    best: Times = {}
    turns = {name: itertools.cycle(tensors) for name, tensors in weights.items()}
    began = time.perf_counter()
    while not best or time.perf_counter() - began < budget:
        for num_tokens, kernel, name in itertools.product(TOKENS, found, weights):
            num_rows, size = SHAPES[name]
            repeats = max(1, SAMPLE_BYTES // (4 * num_rows * size * max(1, num_tokens // 8)))
            x = torch.randn(num_tokens, size)
            chosen = list(itertools.islice(turns[name], repeats))
            start = time.perf_counter()
            for w in chosen:
                found[kernel](x, w, None)
            seconds = (time.perf_counter() - start) / repeats
            key = (name, num_tokens, kernel)
            best[key] = min(seconds, best.get(key, seconds))
    return best


def report(times: Times, found: Mapping[str, Linear]) -> None:
    for name, num_tokens in itertools.product(SHAPES, TOKENS):
        num_rows, size = SHAPES[name]
        line = f"{name:8} T={num_tokens:4}"
        for kernel in found:
            seconds = times[name, num_tokens, kernel]
            rate = 4e-9 * num_rows * size / seconds
            line += f" | {kernel:6} {rate:5.1f} GB/s {rate * num_tokens / 2:6.1f} GFLOP/s"
        print(line)
    for num_tokens in TOKENS:
        line = f"model    T={num_tokens:4}"
        for kernel in found:
            seconds = sum(count(name) * times[name, num_tokens, kernel] for name in SHAPES)
            line += f" | {kernel:6} {1e3 * seconds:7.1f} ms {num_tokens / seconds:6.0f} tokens/s"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--budget", type=float, default=20.0, help="seconds (at least one round)")
    parser.add_argument("--out", type=Path, help="write facts, seconds and the table as JSON")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = None
    with tempfile.TemporaryDirectory() as folder:
        try:
            target = Path(folder, native.file_name())
            native.build(target)
            rows = native.load(target).rows
        except BuildError as error:
            print(error)
    found = kernels(rows)
    weights = {
        name: [torch.randn(shape) / shape[1] ** 0.5 for _ in range(count(name))]
        for name, shape in SHAPES.items()
    }
    times = measure(weights, found, args.budget)
    report(times, found)
    table = tune({SHAPES[name]: tensors for name, tensors in weights.items()}, found)
    for entry in table.entries:
        choices = ", ".join(f"{c.kernel} up to {c.max_tokens}" for c in entry.choices)
        print(f"table    {entry.num_rows}x{entry.size}: {choices or 'torch'}")
    if args.out:
        seconds = [[*key, value] for key, value in times.items()]
        record = {"facts": facts(found), "seconds": seconds, "table": json.loads(table.to_json())}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
