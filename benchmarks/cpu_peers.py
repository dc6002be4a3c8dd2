"""TokenSpeed beside transformers (eager) on a CPU: same model, prompts, threads, precision.

    python benchmarks/cpu_peers.py [--rounds 5] [--threads 2] [--out RESULT.json]

Each engine sits in a process of its own and is idle unless asked; rounds are interleaved, so that a
slow spell of the machine hits both. Greedy, end of sequence ignored, no prefix reuse:

    decode1   batch 1, 32 prompt tokens: 32 steps after the first token, tokens/s
    decode8   batch 8, 32 prompt tokens each: tokens/s of all rows together
    prefill   batch 1, 512 prompt tokens: prompt tokens/s up to the first token

A decode time is (call for 33 output tokens) minus (call for 1), so both are timed alike.
Printed: medians with the range, and their ratio. The ids must agree, or nothing counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from tokenspeed import LLM, SamplingParams, __version__
from tokenspeed.loader.gguf import GgufFile
from tokenspeed.text.source import resolve_model

STEPS = 32
WORKLOADS = {"decode1": (1, 32), "decode8": (8, 32), "prefill": (1, 512)}
Generate = Callable[[list[list[int]], int], list[list[int]]]


def prompts(count: int, length: int) -> list[list[int]]:
    """Fixed ids that no two prompts or positions share a pattern of."""
    return [
        [17 + (7919 * (row * length + i + 1)) % 40000 for i in range(length)]
        for row in range(count)
    ]


def tokenspeed_engine() -> tuple[Generate, str]:
    llm = LLM("smollm2", dtype="float32", enable_prefix_caching=False, max_total_tokens=16384)

    def generate(ids: list[list[int]], count: int) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        return [out.outputs[0].token_ids for out in llm.generate(ids, params, use_tqdm=False)]

    return generate, llm.engine.ready.summary


def transformers_engine() -> tuple[Generate, str]:
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


def serve_engine(name: str, threads: int) -> None:
    """Child process: answer one JSON line for each line asked, until stdin ends."""
    torch.set_num_threads(threads)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an engine prints must not mix with the answers
    generate, description = ENGINES[name]()
    print(json.dumps(description), file=answers, flush=True)
    for line in sys.stdin:
        ids, count = json.loads(line)
        began = time.perf_counter()
        tokens = generate(ids, count)
        answer = {"seconds": time.perf_counter() - began, "ids": tokens}
        print(json.dumps(answer), file=answers, flush=True)


class Engine:
    """Parent's side of one engine process."""

    def __init__(self, name: str, threads: int) -> None:
        command = [sys.executable, __file__, "--engine", name, "--threads", str(threads)]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        assert self.process.stdin and self.process.stdout
        self.ask, self.answers = self.process.stdin, self.process.stdout
        self.description = json.loads(self.answers.readline() or "null")
        if self.description is None:
            raise SystemExit(f"{name} did not start")

    def timed(self, ids: list[list[int]], count: int) -> tuple[float, list[list[int]]]:
        print(json.dumps([ids, count]), file=self.ask, flush=True)
        answer = json.loads(self.answers.readline())
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


def machine(threads: int) -> dict[str, Any]:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "threads": threads,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokenspeed": __version__,
        "command": " ".join(["python", *sys.argv]),
    }


def compare(rounds: int, threads: int) -> dict[str, Any]:
    engines = {name: Engine(name, threads) for name in ENGINES}
    speeds: dict[str, dict[str, list[float]]] = {w: {e: [] for e in ENGINES} for w in WORKLOADS}
    loads = []
    for index in range(rounds + 1):
        loads.append(os.getloadavg()[0])
        for workload in WORKLOADS:
            ids = {}
            for name, engine in engines.items():
                speed, ids[name] = engine.measure(workload)
                if index:  # the first round warms up
                    speeds[workload][name].append(speed)
            if len({json.dumps(tokens) for tokens in ids.values()}) != 1:
                raise SystemExit(f"{workload}: the engines' ids differ, no speed counts")
    summary = {}
    for workload, by_engine in speeds.items():
        rows = {
            name: {"median": statistics.median(v), "min": min(v), "max": max(v)}
            for name, v in by_engine.items()
        }
        ratio = rows["tokenspeed"]["median"] / rows["transformers"]["median"]
        summary[workload] = {**rows, "ratio": ratio}
    described = {name: engine.description for name, engine in engines.items()}
    return {
        "machine": machine(threads),
        "engines": described,
        "load_average": loads,
        "results": summary,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--engine", choices=ENGINES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        serve_engine(args.engine, args.threads)
        return
    report = compare(args.rounds, args.threads)
    print(f"{'tokens/s':10} {'tokenspeed':>22} {'transformers':>22} {'ratio':>6}")
    for workload, row in report["results"].items():
        cells = [
            f"{row[name]['median']:.1f} ({row[name]['min']:.1f}-{row[name]['max']:.1f})"
            for name in ENGINES
        ]
        print(f"{workload:10} {cells[0]:>22} {cells[1]:>22} {row['ratio']:6.2f}")
    print(f"load average {max(report['load_average']):.2f} at most; {report['engines']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
