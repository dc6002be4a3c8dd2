"""The offline face: a sampling parameter, refused before anything runs, cut by stop strings."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tokenspeed import LLM, SamplingParams
from tokenspeed.engine.grammars import Grammars, StepMasks
from tokenspeed.engine.record import Request
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


def test_a_refusal_after_the_end_costs_no_answer(
    structured_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With overlap, one step may bring the token that ends a request and then its refusal."""
    held = SamplingParams(
        temperature=0, max_tokens=8, stop=["a", "b"], structured_outputs={"regex": "[ab]{5}"}
    )
    free = SamplingParams(temperature=0, max_tokens=6)
    real, left = Grammars.masks, itertools.count()

    def failing(self: Grammars, rows: Sequence[Request | None]) -> StepMasks:
        found = real(self, rows)
        if next(left) > 0:
            return found
        ids = [row.id for row in rows if row is not None and row.constraint is not None]
        return StepMasks(found.masks, dict.fromkeys(ids, "no more masks"), [])

    options: dict[str, Any] = {"device": "cpu", "max_total_tokens": 1024, "max_num_seqs": 4}
    with LLM(structured_model, disable_overlap_schedule=False, **options) as llm:
        whole = llm.generate("abc", free)[0].outputs[0]
        monkeypatch.setattr(Grammars, "masks", failing)
        for num_good, reason, error in ((1, "stop", None), (0, "error", "no more masks")):
            left = itertools.count(num_good, -1)
            first, second = llm.generate(["abc", "abc"], [held, free])
            assert (first.outputs[0].finish_reason, first.outputs[0].error) == (reason, error)
            assert second.outputs[0] == whole
        llm.engine.check()
