"""Settings of OpenMP on a CPU: milliseconds a token alone, and beside a program that is busy.

    python benchmarks/cpu_threads.py [--rounds 3] [--tokens 24] [--model smollm2] [--cache FOLDER]
                                     [--out RESULT.json]

Each round starts a process for each setting, with the engine at -O1 out of the cache (`--cache`),
which `tokenspeed warmup` has filled for as many threads. It answers one request alone, and then one
while another process keeps one core busy; said is the time divided by the tokens. Run it where
nothing else runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from other_load import OtherLoad

from tokenspeed import LLM, SamplingParams
from tokenspeed.bench.machine import facts

SETTINGS = {
    "as it is": {},
    "OMP_WAIT_POLICY=PASSIVE": {"OMP_WAIT_POLICY": "PASSIVE"},
    "OMP_NUM_THREADS=1": {"OMP_NUM_THREADS": "1"},
    "GOMP_SPINCOUNT=10000": {"GOMP_SPINCOUNT": "10000"},
}
KINDS = ("alone", "beside")
BUSY = "while True: pass"
SETTLE_S = 0.3


@contextlib.contextmanager
def busy_core() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        time.sleep(SETTLE_S)
        yield
    finally:
        process.kill()
        process.wait()


def measure(model: str, cache: str | None, tokens: int) -> dict[str, float]:
    """Milliseconds a token, in a process whose environment is set already."""
    found = {}
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    with LLM(model, level=1, cache_dir=cache, device="cpu", max_model_len=1024) as llm:
        llm.generate(["Once"], params)
        for kind in KINDS:
            with busy_core() if kind == "beside" else contextlib.nullcontext():
                began = time.perf_counter()
                llm.generate(["Once"], params)
                found[kind] = (time.perf_counter() - began) / tokens * 1e3
    return found


def in_process(setting: str, words: list[str]) -> dict[str, float]:
    """As `measure`, in a process of its own: OpenMP reads its variables once."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "MKL_"))}
    done = subprocess.run(
        [sys.executable, __file__, "--child", *words],
        env=plain | SETTINGS[setting],
        stdout=subprocess.PIPE,
        check=True,
    )
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def table(milliseconds: dict[str, dict[str, list[float]]]) -> str:
    """Markdown: the median of each, and its range."""
    lines = ["| | alone | beside a program that keeps one core busy |", "|---|---|---|"]
    for setting, found in milliseconds.items():
        name = setting if setting == "as it is" else f"`{setting}`"
        cells = (
            f"{statistics.median(each):.0f} ({min(each):.0f} to {max(each):.0f})"
            for each in (found[kind] for kind in KINDS)
        )
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.model, args.cache, args.tokens)))
        return
    # Ended by a time limit, it still ends the programs that keep cores busy.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    words = ["--tokens", str(args.tokens), "--model", args.model]
    words += ["--cache", args.cache] if args.cache else []
    found: dict[str, dict[str, list[float]]] = {
        setting: {kind: [] for kind in KINDS} for setting in SETTINGS
    }
    with OtherLoad() as others:
        for _ in range(args.rounds):
            for setting in SETTINGS:
                for kind, value in in_process(setting, words).items():
                    found[setting][kind].append(value)
    print(table(found))
    print(f"others used {others.cores:.2f} cores")
    if args.out:
        report = {
            "machine": facts(os.cpu_count() or 1),
            "model": args.model,
            "tokens": args.tokens,
            "ms_a_token": found,
            "other_cores": others.cores,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
