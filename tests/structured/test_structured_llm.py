"""The offline face: a sampling parameter, refused before anything runs, cut by stop strings."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tokenspeed import LLM, SamplingParams
from tokenspeed.request import InvalidRequest


@pytest.fixture(scope="module")
def llm(structured_model: str) -> Iterator[LLM]:
    with LLM(structured_model, device="cpu", max_total_tokens=1024, max_num_seqs=4) as llm:
        yield llm
        llm.engine.check()


def test_one_for_all_prompts_or_one_for_each(llm: LLM) -> None:
    free = SamplingParams(temperature=0, max_tokens=8)
    word = SamplingParams(max_tokens=20, n=3, structured_outputs={"choice": ["name", "abc"]})
    schema = {"type": "array", "items": {"enum": [1, "a"]}, "minItems": 2, "maxItems": 3}
    value = SamplingParams(max_tokens=200, seed=3, structured_outputs={"json": schema})
    alone = llm.generate("abc", free)[0].outputs[0].token_ids
    first, second, third = llm.generate(["abc"] * 3, [free, word, value])
    assert first.outputs[0].token_ids == alone
    assert {output.text for output in second.outputs} <= {"name", "abc"}
    assert set(json.loads(third.outputs[0].text)) <= {1, "a"}


def test_a_stop_string_cuts_the_form(llm: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=60, stop=["c"], structured_outputs={"regex": "[ab]{3}c[ab]{3}"}
    )
    output = llm.generate("abc", params)[0].outputs[0]
    assert output.finish_reason == "stop" and output.stop_reason == "c"
    assert len(output.text) == 3 and set(output.text) <= {"a", "b"}


def test_what_cannot_be_is_refused_before_anything_runs(llm: LLM) -> None:
    good = SamplingParams(max_tokens=4)
    bad = SamplingParams(structured_outputs={"json": {"items": {"type": "str"}}})
    with pytest.raises(InvalidRequest, match=r"at \$\.items: Invalid type: str"):
        llm.generate(["abc", "abc"], [good, bad])
    assert not llm.engine.has_work
    for fields in ({}, {"regex": "a", "choice": ["a"]}, {"choice": "ab"}, {"regex": 1}, {"x": 1}):
        with pytest.raises(InvalidRequest, match="structured_outputs"):
            SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
