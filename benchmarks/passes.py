"""What each pass is worth: the engine with all passes, beside the engine without one of them.

    python benchmarks/passes.py [--model DIR --load-format dummy] [--device cuda] [--level 2]
                                [--passes rms_norm,silu_mul] [--tokens 1 8 64] [--prefill 512 2048]
                                [--rounds 5] [--option name=value] [--out RESULT.json]

Two engines in this process, one of them with --disable-pass, each with its own pieces, KV pool and
CUDA graphs; rounds are interleaved, and which goes first alternates. For each number of tokens in a
step: the time of a decode step of as many requests (as `tokenspeed bench latency` has it), or of
one prompt of that length. The gain is the median without the pass over the median with it, less
one: what the pass saves of the whole step, everything else around it unchanged. The range of gains
round by round tells noise from gain.

Passes that are off on the device by default are left out unless named; those that matched nothing
in this model are listed without a row.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from burst import add_server_options, settings_of

from tokenspeed import LLM
from tokenspeed.bench.machine import facts
from tokenspeed.bench.offline import seconds_of
from tokenspeed.bench.workloads import Workload, latency_workloads
from tokenspeed.compile import receipt
from tokenspeed.compile.entry import RECEIPT
from tokenspeed.passes import PIPELINE

DECODE_INPUT, DECODE_STEPS = 32, 32
LEFT_IN = {"noop", "inline"}
"""Passes that only prepare or finish the work of others."""


def workloads_of(args: argparse.Namespace) -> list[Workload]:
    return latency_workloads(args.tokens, DECODE_INPUT, DECODE_STEPS, args.prefill)


def build(args: argparse.Namespace, level: int, cache: str, without: tuple[str, ...]) -> LLM:
    works = workloads_of(args)
    need = max(each.num_prompts * (each.total_len + 16) for each in works)
    options = settings_of(args) | {
        "level": level,
        "cache_dir": cache,
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "max_num_seqs": max(each.num_prompts for each in works),
        "max_total_tokens": need + 64,
        "disable_pass": without,
    }
    return LLM(**options)


def compare(with_it: LLM, without: LLM, works: list[Workload], rounds: int) -> list[dict[str, Any]]:
    """A row for each number of tokens: medians of both, in ms, and the gain."""
    vocab_size = with_it.engine.ready.vocab_size
    engines = {"with": seconds_of(with_it), "without": seconds_of(without)}
    rows = []
    for work in works:
        times: dict[str, list[float]] = {name: [] for name in engines}
        for number in range(rounds + 1):
            for name in list(engines)[:: -1 if number % 2 else 1]:
                found = work.measure(engines[name], vocab_size)
                if number:  # the first round warms up
                    times[name].append(found)
        gains = [100 * (b / a - 1) for a, b in zip(times["with"], times["without"], strict=True)]
        medians = {name: statistics.median(found) for name, found in times.items()}
        rows.append(
            {
                "workload": work.name,
                "with_ms": medians["with"],
                "without_ms": medians["without"],
                "gain_percent": 100 * (medians["without"] / medians["with"] - 1),
                "gains_percent": gains,
            }
        )
    return rows


def candidates(device: str, chosen: str) -> list[str]:
    """Passes that are on by default on the device, or those that were named."""
    names = [
        row.name
        for row in PIPELINE
        if (row.on_cuda if device == "cuda" else row.on_cpu) and row.name not in LEFT_IN
    ]
    if not chosen:
        return names
    unknown = set(chosen.split(",")) - {row.name for row in PIPELINE}
    if unknown:
        raise SystemExit(f"passes.py: no pass {', '.join(sorted(unknown))}")
    return chosen.split(",")


def matches(cache: str) -> dict[str, int]:
    """How often each pass matched in the programs of a cache."""
    found: dict[str, int] = {}
    for path in Path(cache).rglob(RECEIPT):
        for name, count in receipt.decode(path.read_bytes()).totals().items():
            found[name] = found.get(name, 0) + count
    return found


def measure(args: argparse.Namespace, cache: str) -> dict[str, Any]:
    machine = facts()
    device = "cuda" if "gpu" in machine and args.device != "cpu" else "cpu"
    level = args.level if args.level is not None else 2 if device == "cuda" else 1
    with_all = build(args, level, cache, ())
    works = [each for each in workloads_of(args) if each.total_len <= with_all.max_model_len]
    report: dict[str, Any] = {"machine": machine, "engine": with_all.engine.ready.summary}
    matched = matches(cache)
    names = [name for name in candidates(device, args.passes) if name in matched]
    idle = [name for name in candidates(device, args.passes) if name not in matched]
    report |= {"rounds": args.rounds, "matches": matched, "matched_nothing": idle, "passes": {}}
    print(f"matched nothing: {', '.join(idle) or 'none'}")
    print(f"{'pass':22} {'workload':12} {'with':>10} {'without':>10} {'gain':>8}   by round")
    for name in names:
        without = build(args, level, cache, (name,))
        rows = compare(with_all, without, works, args.rounds)
        without.close()
        report["passes"][name] = rows
        for row in rows:
            low, high = min(row["gains_percent"]), max(row["gains_percent"])
            times = f"{row['with_ms']:7.3f} ms {row['without_ms']:7.3f} ms"
            gains = f"{row['gain_percent']:+7.1f}%   {low:+.1f} to {high:+.1f}%"
            print(f"{name:22} {row['workload']:12} {times} {gains}", flush=True)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--level", type=int, help="(default: 1 on a CPU, 2 on a GPU)")
    parser.add_argument("--passes", default="", help="names, with commas between (default: all)")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--prefill", type=int, nargs="*", default=[512, 2048])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", help="a compile cache to use (default: an empty one)")
    args = parser.parse_args()
    with contextlib.ExitStack() as stack:
        cache = args.cache or stack.enter_context(tempfile.TemporaryDirectory())
        report = measure(args, str(Path(cache).resolve()))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
