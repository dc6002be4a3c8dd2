"""SmolLM2 against values that another implementation computed (tests/data/golden_smollm2.json).

Two runs are compared, both in float32: the GGUF as it is, and a folder of bf16-rounded weights.
Nothing here may be loosened because a case differs: the golden margins say how far ids are decided.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tokenspeed import LLM, SamplingParams

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "golden_smollm2.json").read_text())
PROMPTS = GOLDEN["prompts"]
DECISIVE_NATS = 0.02
"""A step whose two best tokens are closer than this is not determined by the weights alone."""

GGUF, BF16 = "weights_gguf_fp32_compute_fp32", "weights_bf16_compute_fp32"

RUNS = [
    pytest.param((GGUF, "smollm2"), id="gguf"),
    pytest.param((BF16, "smollm2_bf16_folder"), id="bf16-folder"),
    pytest.param((GGUF, "smollm2_compiled"), id="gguf-compiled", marks=pytest.mark.long),
]


@pytest.fixture(scope="module")
def smollm2_compiled(smollm2: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """Compiled pieces, as a second start finds them: the first start fills the cache."""
    cache = str(tmp_path_factory.mktemp("compiled"))
    options = {"dtype": "float32", "device": "cpu", "cache_dir": cache}
    with LLM("smollm2", level=1, **options) as cold:
        assert "level 1 (compiled in" in cold.engine.ready.summary
    with LLM("smollm2", **options) as warm:
        assert "level 1 (compile cache hit)" in warm.engine.ready.summary
        yield warm
        warm.engine.check()


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> tuple[str, LLM]:
    name, fixture = request.param
    return name, request.getfixturevalue(fixture)


def determined(golden: dict[str, Any]) -> int:
    """How many leading ids must be equal: through the first eos, or to the first undecided step."""
    margins = golden["top2_margin"]
    close = next((i for i, margin in enumerate(margins) if margin < DECISIVE_NATS), len(margins))
    return close if golden["eos_at"] is None else min(close, golden["eos_at"] + 1)


def free_running(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=0)


def check_against(golden: dict[str, Any], token_ids: list[int], logprobs: list[Any]) -> None:
    count = determined(golden)
    assert token_ids[:count] == golden["ids_ignore_eos"][:count]
    for step, expected in enumerate(golden.get("logprobs", [])[:count]):
        assert logprobs[step].logprob == pytest.approx(expected, abs=1e-4), step


@pytest.mark.parametrize("case", range(len(PROMPTS)))
def test_ids_alone(run: tuple[str, LLM], case: int) -> None:
    name, llm = run
    prompt = PROMPTS[case]
    (output,) = llm.generate([prompt["prompt_ids"]], free_running(64), use_tqdm=False)
    sample = output.outputs[0]
    assert len(sample.token_ids) == 64 and sample.finish_reason == "length"
    check_against(prompt["runs"][name], sample.token_ids, sample.logprobs)


def test_ids_in_one_batch(run: tuple[str, LLM]) -> None:
    name, llm = run
    ids = [prompt["prompt_ids"] for prompt in PROMPTS]
    for prompt, output in zip(
        PROMPTS, llm.generate(ids, free_running(64), use_tqdm=False), strict=True
    ):
        sample = output.outputs[0]
        check_against(prompt["runs"][name], sample.token_ids, sample.logprobs)


@pytest.mark.parametrize("case", range(len(PROMPTS)))
def test_chat_text_and_first_token(run: tuple[str, LLM], case: int) -> None:
    name, llm = run
    prompt, golden = PROMPTS[case], PROMPTS[case]["runs"][name]
    params = SamplingParams(temperature=0.0, max_tokens=64, logprobs=10)
    (output,) = llm.chat([prompt["messages"]], params, use_tqdm=False)
    sample = output.outputs[0]
    assert output.prompt_token_ids == prompt["prompt_ids"]
    if golden["eos_at"] is not None and golden["eos_at"] < determined(golden):
        assert sample.finish_reason == "stop"
        assert sample.text == golden["text"]
        assert len(sample.token_ids) == golden["eos_at"] + 1
    top = sample.logprobs[0].top
    assert len(top) == 10
    expected = golden["first_token_top10"]
    assert [logprob for _, logprob in top] == pytest.approx(expected["logprobs"], abs=1e-4)
    assert {token for token, _ in top} == set(expected["ids"])


@pytest.mark.parametrize("case", range(len(PROMPTS)))
def test_teacher_forced(run: tuple[str, LLM], case: int) -> None:
    name, llm = run
    prompt, golden = PROMPTS[case]["prompt_ids"], PROMPTS[case]["runs"][name]
    ids = golden["ids_ignore_eos"]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=1)
    (output,) = llm.generate([prompt + ids], params, use_tqdm=False)
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt) + 64
    decided = 0
    for step, margin in enumerate(golden["top2_margin"]):
        entry = output.prompt_logprobs[len(prompt) + step]
        assert entry.token_id == ids[step]
        if margin >= DECISIVE_NATS:
            decided += 1
            assert entry.top[0][0] == ids[step], step
    assert decided >= 55


def test_perplexity(run: tuple[str, LLM]) -> None:
    name, llm = run
    golden = GOLDEN["perplexity"]
    text = (DATA / "hamlet_start.txt").read_text("ascii")
    ids = llm.tokenizer.encode(text, add_special_tokens=False)[:4096]
    assert ids[:16] == golden["first_16_ids"]
    digest = hashlib.sha256(struct.pack("<4096I", *ids)).hexdigest()
    assert digest == golden["sha256_of_4096_ids_as_uint32_le"]
    windows = [ids[start : start + 1024] for start in range(0, 4096, 1024)]
    params = SamplingParams(temperature=0.0, max_tokens=0, prompt_logprobs=0)
    sums = [
        -sum(entry.logprob for entry in output.prompt_logprobs[1:])
        for output in llm.generate(windows, params, use_tqdm=False)
    ]
    expected = golden["runs"][name]
    assert sums == pytest.approx(expected["window_nll_sum"], abs=0.5)
    assert math.exp(sum(sums) / 4092) == pytest.approx(expected["perplexity"], abs=0.01)
