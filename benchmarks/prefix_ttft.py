"""Time to the first token of requests with a common prefix, with and without prefix caching.

    python benchmarks/prefix_ttft.py [--prefix-len 8192] [--own-len 128] [--requests 64]
                                     [--model DIR --load-format dummy] [--device cuda]
                                     [--option name=value] [--out RESULT.json]

Against a fresh `tokenspeed serve` for each of the two: one warm request with the prefix and tokens
of its own, then all requests at once, each with the prefix and tokens of its own. The mean of their
times to the first token is what counts.
"""

from __future__ import annotations

import argparse
import json
import statistics
from typing import Any

from burst import add_server_options, burst, sessions_of, settings_of, vocab_size_of

from tokenspeed.bench.child_server import serving
from tokenspeed.bench.machine import facts
from tokenspeed.bench.workloads import prompts

OUTPUT_LEN = 4


def ttfts_ms(settings: dict[str, Any], args: argparse.Namespace) -> list[float]:
    vocab_size = vocab_size_of(args.model)
    (prefix,) = prompts(1, args.prefix_len, vocab_size)
    own = prompts(args.requests + 1, args.own_len, vocab_size)
    sessions = sessions_of([prefix + each for each in own], OUTPUT_LEN)
    with serving(settings) as url:
        burst(url, sessions[:1])
        _, records = burst(url, sessions[1:])
    return [1e3 * record.ttft for record in records]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--prefix-len", type=int, default=8192)
    parser.add_argument("--own-len", type=int, default=128)
    parser.add_argument("--requests", type=int, default=64)
    args = parser.parse_args()
    settings = settings_of(args) | {"max_num_seqs": args.requests}
    report: dict[str, Any] = {"machine": facts(), "settings": settings}
    report |= {name: getattr(args, name) for name in ("prefix_len", "own_len", "requests")}
    for name, is_on in (("cached", True), ("not_cached", False)):
        found = ttfts_ms(settings | {"enable_prefix_caching": is_on}, args)
        report[name] = {"mean_ttft_ms": statistics.mean(found), "ttfts_ms": found}
        print(f"{name:10} mean TTFT {report[name]['mean_ttft_ms']:.1f} ms", flush=True)
    report["speedup"] = report["not_cached"]["mean_ttft_ms"] / report["cached"]["mean_ttft_ms"]
    print(f"prefix caching: {report['speedup']:.1f} times sooner")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
