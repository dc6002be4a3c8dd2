"""TokenSpeed beside transformers (eager) on a CPU: same model, prompts, threads, precision.

    python benchmarks/cpu_peers.py [--rounds 5] [--threads 2] [--level 1] [--weight-layout plain]
                                   [--out RESULT.json]

Each engine sits in a process of its own and is idle unless asked; rounds are interleaved, so that a
slow spell of the machine hits both. Greedy, end of sequence ignored, no prefix reuse:

    decode1   batch 1, 32 prompt tokens: 32 steps after the first token, tokens/s
    decode8   batch 8, 32 prompt tokens each: tokens/s of all rows together
    prefill   batch 1, 512 prompt tokens: prompt tokens/s up to the first token

A decode time is (call for 33 output tokens) minus (call for 1), so both are timed alike. A round in
which other processes used more than 0.2 cores is discarded, counted, and made up for by another.
Printed: medians with the range, and their ratio. The ids must agree, or nothing counts.

Memory is an engine process's resident size after the run less that after imports and before
loading. TokenSpeed's stands beside its weights in float32 plus its KV pool, which is just large
enough.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from other_load import OtherLoad, resident_mib

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.machine import facts
from tokenspeed.kv.pool import bytes_per_page
from tokenspeed.kv.specs import cache_groups
from tokenspeed.loader.gguf import GgufFile
from tokenspeed.models import family_of
from tokenspeed.text.source import resolve_model

STEPS = 32
WORKLOADS = {"decode1": (1, 32), "decode8": (8, 32), "prefill": (1, 512)}
POOL_TOKENS = 1024
MAX_OTHER_CORES = 0.2
TRIES = 4
"""Rounds that are tried for each that is asked for."""
LEVEL_MODULES = ("tokenspeed.compile.warm", "tokenspeed.compile.pipeline")
"""What a start imports when it knows its level: Inductor, Dynamo."""

Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts(count: int, length: int) -> list[list[int]]:
    """Fixed ids that no two prompts or positions share a pattern of."""
    return [
        [17 + (7919 * (row * length + i + 1)) % 40000 for i in range(length)]
        for row in range(count)
    ]


def tokenspeed_engine(options: dict[str, Any]) -> tuple[Generate, str]:
    llm = LLM(
        "smollm2",
        dtype="float32",
        enable_prefix_caching=False,
        max_total_tokens=POOL_TOKENS,
        **options,
    )

    def generate(ids: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate(ids, params, use_tqdm=False)]

    return generate, llm.engine.ready.summary


def budget_mib() -> dict[str, float]:
    """TokenSpeed's weights in float32, its parameters counted once, and its KV pool."""
    source = resolve_model("smollm2")
    family = family_of(source.config)
    config = family.config.from_dict(source.config)
    with torch.device("meta"):
        parameters = family.model(config).parameters()
    groups = cache_groups(family.cache_specs(config))
    return {
        "weights_mib": 4 * sum(each.numel() for each in parameters) / 2**20,
        "pool_mib": POOL_TOKENS * bytes_per_page(groups, 1, torch.float32) / 2**20,
    }


def transformers_engine(options: dict[str, Any]) -> tuple[Generate, str]:
    source = resolve_model("smollm2")
    transformers.utils.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**source.config)
    model = transformers.LlamaForCausalLM(config).to(torch.float32).eval()
    weights = GgufFile(source.path)  # transformers itself reads GGUF only with one more package
    state = {name: weights.read(name) for name in weights.shapes}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected, (missing, unexpected)
    model.tie_weights()
    model.generation_config.eos_token_id = None

    def generate(ids: list[list[int]], count: int) -> list[list[int]]:
        x = torch.tensor(ids)
        with torch.inference_mode():
            out = model.generate(
                x,
                attention_mask=torch.ones_like(x),
                do_sample=False,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        return out[:, x.shape[1] :].tolist()

    return generate, "eager, float32"


ENGINES = {"tokenspeed": tokenspeed_engine, "transformers": transformers_engine}


def serve_engine(name: str, threads: int, options: dict[str, Any]) -> None:
    """Child process: answer one JSON line for each line asked, until stdin ends. An answer also
    says by how much the process has grown since before loading.
    """
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not mix with the answers
    if name == "tokenspeed":
        for module in LEVEL_MODULES:
            importlib.import_module(module)
    before = resident_mib()
    generate, description = ENGINES[name](options)
    print(json.dumps(description), file=answers, flush=True)
    for line in sys.stdin:
        ids, count = json.loads(line)
        began = time.perf_counter()
        tokens = generate(ids, count)
        answer = {"seconds": time.perf_counter() - began, "ids": tokens}
        answer["grown_mib"] = resident_mib() - before
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """Parent's side of one engine process."""

    def __init__(self, name: str, threads: int, options: dict[str, Any]) -> None:
        command = [sys.executable, __file__, "--engine", name, "--threads", str(threads)]
        command += [f"--{key.replace('_', '-')}={value}" for key, value in options.items()]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdin and self.process.stdout
        self.ask, self.answers = self.process.stdin, self.process.stdout
        self.grown_mib = 0.0
        self.description = json.loads(self.answers.readline() or "null")
        if self.description is None:
            raise SystemExit(f"{name} did not start")

    def timed(self, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        print(json.dumps([ids, count]), file=self.ask, flush=True)
        answer = json.loads(self.answers.readline())
        self.grown_mib = answer["grown_mib"]
        return answer["seconds"], answer["ids"]

    def measure(self, workload: str) -> tuple[float, list[list[int]]]:
        """Tokens/s of one workload, and the ids."""
        batch, length = WORKLOADS[workload]
        ids = prompts(batch, length)
        first, tokens = self.timed(ids, 1)
        if workload == "prefill":
            return length / first, tokens
        whole, tokens = self.timed(ids, STEPS + 1)
        return batch * STEPS / (whole - first), tokens


def run_round(engines: dict[str, Engine]) -> dict[str, dict[str, float]]:
    """Tokens/s by workload and engine."""
    speeds: dict[str, dict[str, float]] = {}
    for workload in WORKLOADS:
        measured = {name: engine.measure(workload) for name, engine in engines.items()}
        if len({json.dumps(ids) for _, ids in measured.values()}) != 1:
            raise SystemExit(f"{workload}: the engines' ids differ, no speed counts")
        speeds[workload] = {name: speed for name, (speed, _) in measured.items()}
    return speeds


def run_rounds(engines: dict[str, Engine], count: int) -> tuple[list[Any], list[float]]:
    """The speeds of `count` rounds in which the machine was ours (fewer if it hardly ever was), and
    how many cores others used in each round tried.
    """
    run_round(engines)  # warms up
    kept, loads = [], []
    while len(kept) < count and len(loads) < TRIES * count:
        with OtherLoad() as others:
            speeds = run_round(engines)
        loads.append(others.cores)
        if others.cores <= MAX_OTHER_CORES:
            kept.append(speeds)
    if not kept:
        raise SystemExit(f"other processes used {min(loads):.2f} cores or more in every round")
    return kept, loads


def compare(rounds: int, threads: int, options: dict[str, Any]) -> dict[str, Any]:
    engines = {name: Engine(name, threads, options) for name in ENGINES}
    kept, loads = run_rounds(engines, rounds)
    results = {}
    for workload in WORKLOADS:
        rows = {}
        for name in ENGINES:
            speeds = [each[workload][name] for each in kept]
            median = statistics.median(speeds)
            rows[name] = {"median": median, "min": min(speeds), "max": max(speeds)}
        ratio = rows["tokenspeed"]["median"] / rows["transformers"]["median"]
        results[workload] = {**rows, "ratio": ratio}
    budget = budget_mib()
    grown = {name: engine.grown_mib for name, engine in engines.items()}
    return {
        "machine": facts(threads, transformers=transformers.__version__),
        "engines": {name: engine.description for name, engine in engines.items()},
        "rounds": {"kept": len(kept), "discarded": len(loads) - len(kept), "other_cores": loads},
        "results": results,
        "memory": {
            "grown_mib": grown,
            **budget,
            "ratio": grown["tokenspeed"] / sum(budget.values()),
        },
    }


def show(report: dict[str, Any]) -> None:
    print(f"{'tokens/s':10} {'tokenspeed':>22} {'transformers':>22} {'ratio':>6}")
    for workload, row in report["results"].items():
        cells = [
            f"{row[name]['median']:.1f} ({row[name]['min']:.1f}-{row[name]['max']:.1f})"
            for name in ENGINES
        ]
        print(f"{workload:10} {cells[0]:>22} {cells[1]:>22} {row['ratio']:6.2f}")
    memory, rounds = report["memory"], report["rounds"]
    cells = [f"{memory['grown_mib'][name]:.0f}" for name in ENGINES]
    print(f"{'MiB':10} {cells[0]:>22} {cells[1]:>22}", end="   ")
    print(
        f"tokenspeed: {memory['ratio']:.2f} x ({memory['weights_mib']:.0f} weights in float32 + "
        f"{memory['pool_mib']:.0f} KV pool)"
    )
    print(
        f"rounds: {rounds['kept']} kept, {rounds['discarded']} discarded (others used up to "
        f"{max(rounds['other_cores']):.2f} cores); {report['engines']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--level", type=int, help="of TokenSpeed (default: its own)")
    parser.add_argument("--weight-layout", help="of TokenSpeed (default: its own)")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    options = {"level": args.level, "weight_layout": args.weight_layout}
    options = {name: value for name, value in options.items() if value is not None}
    if args.engine:
        serve_engine(args.engine, args.threads, options)
        return
    report = compare(args.rounds, args.threads, options)
    show(report)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
