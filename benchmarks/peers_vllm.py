"""The workloads of gpu_engine.py through vLLM's `LLM`, where vLLM is installed (0.22 was used).

    python benchmarks/peers_vllm.py CONFIG_FOLDER [--only decode1,mixed] [--num-iters 3]
                                    [--out RESULT.json]

Dummy weights, token ids in, greedy, end of sequence ignored, no prefix reuse, its defaults
otherwise. The result is what `gpu_engine.py --peer RESULT.json` compares with.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import msgspec

from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.bench.workloads import Seconds, latency_workloads, measure, throughput_workloads

try:
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
except ImportError as error:
    sys.exit(f"peers_vllm.py needs vLLM in this environment (pip install vllm): {error}")

WORKLOADS = {each.name: each for each in (*latency_workloads(), *throughput_workloads())}


def seconds_of(llm: LLM) -> Seconds:
    def seconds(ids: list[list[int]], count: int) -> float:
        params = SamplingParams(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        given = [TokensPrompt(prompt_token_ids=each) for each in ids]
        began = time.perf_counter()
        outputs = llm.generate(given, params, use_tqdm=False)
        taken = time.perf_counter() - began
        assert all(len(each.outputs[0].token_ids) == count for each in outputs)
        return taken

    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="with config.json")
    parser.add_argument("--only", default="", help=f"of {','.join(WORKLOADS)}")
    parser.add_argument("--num-iters", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    card = gpu_speed()
    began = time.perf_counter()
    llm = LLM(
        model=args.folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=256,
        max_model_len=9216,
        gpu_memory_utilization=0.8,
    )
    ready_s = time.perf_counter() - began
    vocab_size = json.loads(Path(args.folder, "config.json").read_text())["vocab_size"]
    chosen = [WORKLOADS[name] for name in args.only.split(",")] if args.only else WORKLOADS.values()
    results = []
    for result in measure(chosen, seconds_of(llm), vocab_size, args.num_iters):
        print(f"{result.name:12} {result.median:12.3f} {result.unit}", flush=True)
        results.append(result)
    report = {
        "machine": facts(**card, vllm=vllm.__version__),
        "model": Path(args.folder).name,
        "ready_s": ready_s,
        "results": results,
    }
    if args.out:
        encoded = msgspec.json.format(msgspec.json.encode(report), indent=1)
        args.out.write_bytes(encoded + b"\n")


if __name__ == "__main__":
    main()
