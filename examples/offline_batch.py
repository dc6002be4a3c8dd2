"""Answer prompts from a text file without a server: one prompt a line in, one JSON a line out.

    python examples/offline_batch.py prompts.txt answers.jsonl

`tokenspeed batch` does the same for OpenAI batch files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenspeed import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path, help="a question a line")
    parser.add_argument("answers", type=Path, help="where the answers go")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=64)
    options = parser.parse_args()

    questions = options.prompts.read_text().splitlines()
    params = SamplingParams(temperature=0.0, max_tokens=options.max_tokens)
    with LLM(options.model) as llm, options.answers.open("w") as file:
        # One call for all: the engine batches them, and answers come back in order.
        outputs = llm.chat([[{"role": "user", "content": each}] for each in questions], params)
        for question, output in zip(questions, outputs, strict=True):
            best = output.outputs[0]
            entry = {"question": question, "answer": best.text, "finish": best.finish_reason}
            file.write(json.dumps(entry, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
