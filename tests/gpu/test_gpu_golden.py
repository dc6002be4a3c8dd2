"""SmolLM2 in float32 on a GPU against the golden values, which a CPU computed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from golden_smollm2 import (
    GGUF,
    PROMPTS,
    assert_golden_choices,
    assert_golden_ids,
    assert_golden_perplexity,
)
from gpu_engines import GPU_ENGINE_MARKS, wide_products

from tokenspeed import LLM

pytestmark = GPU_ENGINE_MARKS

TOLERANCE = 3e-4
"""Sums of a GPU have an order of their own: a few units in the last place, in each of 30 layers."""


@pytest.fixture(scope="module")
def llm(bundled: None) -> Iterator[LLM]:
    pytest.importorskip("gguf", reason="reads the bundled model's file")
    with wide_products(), LLM("smollm2", dtype="float32", device="cuda", level=0) as made:
        yield made
        made.engine.check()


def test_ids_in_one_batch(llm: LLM) -> None:
    assert_golden_ids(llm, GGUF, list(range(len(PROMPTS))), TOLERANCE)


@pytest.mark.parametrize("case", range(len(PROMPTS)))
def test_alone(llm: LLM, case: int) -> None:
    assert_golden_ids(llm, GGUF, [case], TOLERANCE)
    assert_golden_choices(llm, GGUF, case)


def test_perplexity(llm: LLM) -> None:
    assert_golden_perplexity(llm, GGUF)
