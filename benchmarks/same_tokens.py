"""A few greedy tokens of a model with made-up weights, as JSON, from whatever the cache holds.

    python benchmarks/same_tokens.py FOLDER [--device cuda] [--forbid-compiles]

Run in two places, the outputs are equal if both compute the same. With --forbid-compiles the exit
status is 1 if anything was compiled, and what it was goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys

from tokenspeed import LLM, SamplingParams, ledger
from tokenspeed.bench.workloads import prompts

LENGTHS = (3, 100, 700, 3000)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--forbid-compiles", action="store_true")
    args = parser.parse_args()
    llm = LLM(
        args.folder,
        device=args.device,
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=9216,
        max_num_seqs=256,
    )
    vocab_size = llm.engine.ready.vocab_size
    ids = [prompts(1, length, vocab_size)[0] for length in LENGTHS]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    found = llm.generate(ids, params, use_tqdm=False)
    print(json.dumps([each.outputs[0].token_ids for each in found]))
    compiled = [str(each) for each in ledger.totals() if each.count]
    if args.forbid_compiles and compiled:
        print("\n".join(compiled), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
