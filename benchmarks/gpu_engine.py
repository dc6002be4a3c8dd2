"""The engine on a GPU, by the workloads of the published table of peers (dummy weights, bfloat16).

    python benchmarks/gpu_engine.py CONFIG_FOLDER [--only decode1,decode64] [--out RESULT.json]

Prompts are token ids, greedy, end of sequence ignored, no prefix reuse. Medians of 3.

    decode1, 8, 64, 256   128 tokens in: (time for 129 tokens - time for 1) / 128 steps
    ttft128, ttft8192     one request, time to the first token
    prefill               32 x 4096 tokens in, 1 out: prompt tokens/s
    mixed                 256 requests of 1024 in, 256 out: output tokens/s
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tokenspeed import LLM, SamplingParams

PEER = {  # vLLM 0.22.0 on the same card: ms a step, ms, tokens/s
    "qwen3-0.6b": {
        "decode1": 1.68, "decode8": 2.332, "decode64": 2.680, "decode256": 6.316,
        "ttft128": 8.3, "ttft8192": 34.5, "prefill": 346822, "mixed": 18602,
    },
    "qwen3-8b": {
        "decode1": 5.20, "decode8": 5.351, "decode64": 6.188, "decode256": 11.263,
        "ttft128": 19.8, "ttft8192": 217, "prefill": 40100, "mixed": 5775,
    },
}  # fmt: skip
REPEATS = 3


def prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    return [
        [(7919 * (row * length + i) + 31 * row) % (vocab_size - 100) for i in range(length)]
        for row in range(count)
    ]


def seconds(llm: LLM, ids: list[list[int]], count: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(ids, params, use_tqdm=False)
    return time.perf_counter() - began


def decode_ms(llm: LLM, rows: int, vocab_size: int) -> float:
    ids = prompts(rows, 128, vocab_size)
    seconds(llm, ids, 4)
    return statistics.median(
        1e3 * (seconds(llm, ids, 129) - seconds(llm, ids, 1)) / 128 for _ in range(REPEATS)
    )


def ttft_ms(llm: LLM, length: int, vocab_size: int) -> float:
    ids = prompts(1, length, vocab_size)
    seconds(llm, ids, 1)
    return statistics.median(1e3 * seconds(llm, ids, 1) for _ in range(REPEATS))


def prefill_speed(llm: LLM, vocab_size: int) -> float:
    ids = prompts(32, 4096, vocab_size)
    return statistics.median(32 * 4096 / seconds(llm, ids, 1) for _ in range(2))


def mixed_speed(llm: LLM, vocab_size: int) -> float:
    ids = prompts(256, 1024, vocab_size)
    return 256 * 256 / seconds(llm, ids, 256)


def measure(folder: str, only: set[str], options: dict[str, Any]) -> dict[str, Any]:
    began = time.perf_counter()
    llm = LLM(
        folder,
        device="cuda",
        load_format="dummy",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_num_seqs=256,
        max_model_len=9216,
        gpu_memory_utilization=0.8,
        **options,
    )
    results: dict[str, Any] = {"ready_s": time.perf_counter() - began}
    results["summary"] = llm.engine.ready.summary
    size = llm.engine.ready.vocab_size
    works: dict[str, Any] = {
        f"decode{rows}": lambda rows=rows: decode_ms(llm, rows, size) for rows in (1, 8, 64, 256)
    }
    works |= {f"ttft{n}": lambda n=n: ttft_ms(llm, n, size) for n in (128, 8192)}
    works |= {
        "prefill": lambda: prefill_speed(llm, size),
        "mixed": lambda: mixed_speed(llm, size),
    }
    for name, work in works.items():
        if only and name not in only:
            continue
        value = results[name] = work()
        peer = PEER.get(Path(folder).name, {}).get(name)
        ratio = None
        if peer:
            ratio = value / peer if name in ("prefill", "mixed") else peer / value
        results[f"{name}_ratio"] = ratio
        shown = f"{ratio:.2f} x vLLM" if ratio else ""
        print(f"{Path(folder).name:12} {name:10} {value:10.3f} {shown}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("--only", default="")
    parser.add_argument("--option", action="append", default=[], help="name=value of an LLM option")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    options = dict(each.split("=", 1) for each in args.option)
    typed = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    result = measure(args.folder, set(filter(None, args.only.split(","))), typed)
    print(json.dumps(result))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
