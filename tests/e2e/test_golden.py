"""SmolLM2 against the golden values: the GGUF as it is, a folder of bf16-rounded weights, and
compiled pieces.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from golden_smollm2 import (
    BF16,
    GGUF,
    PROMPTS,
    assert_golden_choices,
    assert_golden_ids,
    assert_golden_perplexity,
    determined,
)

from tokenspeed import LLM, SamplingParams

RUNS = [
    pytest.param((GGUF, "smollm2"), id="gguf"),
    pytest.param((BF16, "smollm2_bf16_folder"), id="bf16-folder", marks=pytest.mark.long),
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


@pytest.mark.parametrize("case", range(len(PROMPTS)))
def test_ids_alone(run: tuple[str, LLM], case: int) -> None:
    name, llm = run
    assert_golden_ids(llm, name, [case])


def test_ids_in_one_batch(run: tuple[str, LLM]) -> None:
    name, llm = run
    assert_golden_ids(llm, name, list(range(len(PROMPTS))))


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
    assert_golden_choices(llm, name, case)


@pytest.mark.long
def test_perplexity(run: tuple[str, LLM]) -> None:
    name, llm = run
    assert_golden_perplexity(llm, name)
