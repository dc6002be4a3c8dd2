"""The engine on a GPU beside the published table of vLLM (dummy weights, bfloat16).

    python benchmarks/gpu_engine.py CONFIG_FOLDER [--only decode1,mixed] [--option name=value ...]
                                    [--kv-cache-dtype fp8] [--num-iters 3]
                                    [--peer RESULT.json] [--out RESULT.json]

The workloads and their definitions are those of `tokenspeed bench latency` and `throughput`
(tokenspeed/bench/workloads.py). What is added here is the ratio to vLLM, above 1 where TokenSpeed
is faster: to the table in published.py, or to a result of peers_vllm.py given with --peer.

In the same run, before the engine is built, the card itself is measured: a copy of 8 GiB and a
product of 8192 x 8192 bfloat16 matrices. Where either is more than 3% off the card of the table
(4.3 TB/s, 790 TFLOP/s), a second ratio says what a card as fast as that one would have given: steps
and short prompts are scaled by the copy, long prompts by the product, mixed by the geometric mean
of the two. A result of peers_vllm.py is taken to be from this card, and is not scaled.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import msgspec
from burst import typed
from published import PEER, PEER_CARD

from tokenspeed import LLM
from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.bench.offline import line, run
from tokenspeed.bench.workloads import Workload, latency_workloads, throughput_workloads
from tokenspeed.config import OPTIONS as OPTION_TABLE

TOLERANCE = 0.03
BY_MATMUL = ("ttft8192", "prefill")
BY_BOTH = ("mixed",)

KV_CACHE_DTYPES = OPTION_TABLE["kv_cache_dtype"].choices
WORKLOADS = {each.name: each for each in (*latency_workloads(), *throughput_workloads())}
OPTIONS: dict[str, Any] = {
    "device": "cuda",
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "max_num_seqs": 256,
    "max_model_len": 9216,
    "gpu_memory_utilization": 0.8,
}


def card_share(name: str, card: dict[str, float]) -> float:
    """How much faster this card is than the table's, for what a workload asks of it."""
    copy, matmul = (card[key] / usual for key, usual in PEER_CARD.items())
    if name in BY_BOTH:
        return math.sqrt(copy * matmul)
    return matmul if name in BY_MATMUL else copy


def is_usual(card: dict[str, float]) -> bool:
    return all(abs(card[key] / usual - 1) <= TOLERANCE for key, usual in PEER_CARD.items())


def ratio(workload: Workload, value: float, peer: float) -> float:
    return value / peer if workload.is_speed else peer / value


def read_peer(path: Path | None, model: str) -> tuple[dict[str, float], bool]:
    """The peer's figures, and whether they are from this card."""
    if path is None:
        return PEER.get(model, {}), False
    results = json.loads(path.read_text())["results"]
    return {each["name"]: each["median"] for each in results}, True


def measure(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    card = gpu_speed()
    print(f"card: {card['copy_tb_s']:.2f} TB/s, {card['matmul_tflop_s']:.0f} TFLOP/s", flush=True)
    model = Path(args.folder).name
    peers, is_same_card = read_peer(args.peer, model)
    began = time.perf_counter()
    llm = LLM(args.folder, **{**OPTIONS, **options})
    results: dict[str, Any] = {"ready_s": time.perf_counter() - began}
    results["summary"] = llm.engine.ready.summary
    chosen = args.only.split(",") if args.only else list(WORKLOADS)
    runs = {}
    for result in run(llm, [WORKLOADS[name] for name in chosen], args.num_iters):
        workload, name = WORKLOADS[result.name], result.name
        results[name], runs[name] = result.median, result.runs
        shown = ""
        if name in peers:
            results[f"{name}_ratio"] = ratio(workload, result.median, peers[name])
            shown = f"   {results[f'{name}_ratio']:.2f} x vLLM"
            if not is_usual(card) and not is_same_card:
                scaled = results[f"{name}_ratio"] / card_share(name, card)
                results[f"{name}_ratio_normalised"] = scaled
                shown += f", {scaled:.2f} on a card like its"
        print(f"{model:12} {line(result)}{shown}", flush=True)
    return {"machine": facts(**card), "model": model, "results": results, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of a model or of its config.json alone")
    parser.add_argument("--only", default="", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--option", action="append", default=[], help="name=value of an LLM option")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="of keys and values"
    )
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="result of peers_vllm.py on this card")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    unknown = set(filter(None, args.only.split(","))) - WORKLOADS.keys()
    if unknown:
        parser.error(f"no workload {', '.join(sorted(unknown))}; there are {', '.join(WORKLOADS)}")
    options = dict(each.split("=", 1) for each in args.option)
    typed_options = {name: typed(value) for name, value in options.items()}
    report = measure(args, {"kv_cache_dtype": args.kv_cache_dtype, **typed_options})
    encoded = msgspec.json.format(msgspec.json.encode(report), indent=1).decode()
    print(encoded)
    if args.out:
        args.out.write_text(encoded + "\n")


if __name__ == "__main__":
    main()
