"""SmolLM2's golden values, computed in float32 by another implementation, and how an LLM of it is
held against them (tests/data/golden_smollm2.json).

Nothing here may be loosened because a case differs: the golden margins say how far ids are decided.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import LLM, SamplingParams

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "golden_smollm2.json").read_text())
PROMPTS = GOLDEN["prompts"]
DECISIVE_NATS = 0.02
"""A step whose two best tokens are closer than this is not determined by the weights alone."""

GGUF, BF16 = "weights_gguf_fp32_compute_fp32", "weights_bf16_compute_fp32"
"""The two runs, both in float32: the GGUF as it is, and a folder of bf16-rounded weights."""


def determined(golden: dict[str, Any]) -> int:
    """How many leading ids must be equal: through the first eos, or to the first undecided step."""
    margins = golden["top2_margin"]
    close = next((i for i, margin in enumerate(margins) if margin < DECISIVE_NATS), len(margins))
    return close if golden["eos_at"] is None else min(close, golden["eos_at"] + 1)


def assert_golden_ids(llm: LLM, run: str, cases: list[int], tolerance: float = 1e-4) -> None:
    """These cases as one batch: ids as far as they are determined, and their log-probabilities."""
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=0)
    ids = [PROMPTS[case]["prompt_ids"] for case in cases]
    for case, output in zip(cases, llm.generate(ids, params, use_tqdm=False), strict=True):
        golden, (sample,) = PROMPTS[case]["runs"][run], output.outputs
        assert len(sample.token_ids) == 64 and sample.finish_reason == "length"
        count = determined(golden)
        assert list(sample.token_ids[:count]) == golden["ids_ignore_eos"][:count], case
        assert sample.logprobs is not None
        for step, expected in enumerate(golden.get("logprobs", [])[:count]):
            found = sample.logprobs[step].logprob
            assert found == pytest.approx(expected, abs=tolerance), (case, step)


def assert_golden_choices(llm: LLM, run: str, case: int) -> None:
    """Fed the golden ids, the likeliest token is the golden one at every step that is decided."""
    prompt, golden = PROMPTS[case]["prompt_ids"], PROMPTS[case]["runs"][run]
    ids = golden["ids_ignore_eos"]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    (output,) = llm.generate([prompt + ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) + 64
    decided = 0
    for step, margin in enumerate(golden["top2_margin"]):
        entry = output.prompt_logprobs[len(prompt) + step]
        assert entry is not None and entry.token_id == ids[step]
        if margin >= DECISIVE_NATS:
            decided += 1
            assert entry.top[0][0] == ids[step], step
    assert decided >= 55


def assert_golden_perplexity(llm: LLM, run: str) -> None:
    """Of the beginning of Hamlet, in windows of 1024 tokens."""
    golden = GOLDEN["perplexity"]
    text = (DATA / "hamlet_start.txt").read_text("ascii")
    ids = llm.tokenizer.encode(text, add_special_tokens=False)[:4096]
    assert ids[:16] == golden["first_16_ids"]
    digest = hashlib.sha256(struct.pack("<4096I", *ids)).hexdigest()
    assert digest == golden["sha256_of_4096_ids_as_uint32_le"]
    windows = [ids[start : start + 1024] for start in range(0, 4096, 1024)]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    sums = []
    for output in llm.generate(windows, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        sums.append(-sum(entry.logprob for entry in output.prompt_logprobs[1:] if entry))
    expected = golden["runs"][run]
    assert sums == pytest.approx(expected["window_nll_sum"], abs=0.5)
    assert math.exp(sum(sums) / 4092) == pytest.approx(expected["perplexity"], abs=0.01)
