"""From `tokenspeed serve` in a fresh process to the first token, compile cache empty and filled.

    python benchmarks/first_token.py [--runs 3] [--input-len 128] [--level 1]
                                     [--model DIR --load-format dummy] [--device cuda]
                                     [--option name=value] [--out RESULT.json]

As `tokenspeed bench startup`, which says where the time goes: the clock runs from the start of the
server's first process until the first event of a streamed request of that many token ids has been
read. cold: an empty cache folder each time; warm: the folder that a cold start filled. Medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any

from burst import add_server_options, settings_of, vocab_size_of

from tokenspeed.bench.child_server import StartFailed
from tokenspeed.bench.machine import facts
from tokenspeed.bench.startup import Plan, measure
from tokenspeed.bench.workloads import prompts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--level", type=int, help="(default: 1 on a CPU, 2 on a GPU)")
    args = parser.parse_args()
    machine = facts()
    on_gpu = "gpu" in machine and args.device != "cpu"
    level = args.level if args.level is not None else 2 if on_gpu else 1
    settings = settings_of(args) | {"level": level}
    (prompt,) = prompts(1, args.input_len, vocab_size_of(args.model))
    plan = Plan(settings, args.runs, level > 0, prompt, None)
    try:
        starts = measure(plan, lambda line: print(line, file=sys.stderr, flush=True))
    except StartFailed as error:
        raise SystemExit(f"first_token.py: {error}") from None
    report: dict[str, Any] = {"machine": machine, "settings": settings, "input_len": args.input_len}
    for kind in dict.fromkeys(start.kind for start in starts):
        walls = [start.wall for start in starts if start.kind == kind]
        ready = [start.ready - start.began for start in starts if start.kind == kind]
        report[kind] = {
            "first_token_s": statistics.median(walls),
            "ready_s": statistics.median(ready),
            "runs_s": walls,
        }
        print(
            f"{kind:5} first token after {report[kind]['first_token_s']:.2f} s "
            f"({min(walls):.2f}-{max(walls):.2f}), ready after {report[kind]['ready_s']:.2f} s"
        )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
