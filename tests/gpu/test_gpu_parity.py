"""Every family on a GPU against transformers on the same GPU: in float32 the same greedy tokens, in
bfloat16 no further from float32 than transformers' own bfloat16.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import Outcome, run
from gpu_engines import (
    DEVICE,
    GPU_ENGINE_MARKS,
    assert_follows,
    draw_prompts,
    gpu_engine,
    greedy,
    scored,
    wide_products,
)
from torch import Tensor

pytestmark = GPU_ENGINE_MARKS

VARIANTS = (
    *("llama", "llama-tied", "llama-biases", "llama-mha-wide-heads"),
    *("qwen2", "qwen2-tied", "qwen3", "qwen3-tied-bias"),
)
NO_WORSE = 1.2
"""Of two roundings of one model, each as good as the other."""

LENGTHS = (1, 9, 40, 100)


@pytest.fixture(scope="module")
def transformers_side() -> Any:
    """Checkpoints and models of transformers, which takes seconds to import, and warns."""
    return importlib.import_module("checkpoints")


@pytest.fixture(autouse=True)
def no_tf32() -> Iterator[None]:
    with wide_products():
        yield


def test_all_families_are_here(transformers_side: Any) -> None:
    assert set(VARIANTS) == transformers_side.VARIANTS.keys()


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_tokens(transformers_side: Any, tmp_path: Path, name: str) -> None:
    family, fields = transformers_side.VARIANTS[name]
    folder = transformers_side.write_checkpoint(tmp_path / name, family, **fields)
    reference = transformers_side.load_reference(folder, family, device=DEVICE)
    engine = gpu_engine(folder, dtype="float32", attention_backend="triton")
    prompts = draw_prompts(LENGTHS)
    outcomes = run(engine, greedy(prompts))
    for each, prompt in zip(greedy(prompts), prompts, strict=True):
        assert len(outcomes[each.id].token_ids) == 24
        assert_follows(outcomes[each.id], prompt, reference)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_errs_no_more(transformers_side: Any, tmp_path: Path, family: str) -> None:
    folder = transformers_side.write_checkpoint(tmp_path / family, family)
    exact, theirs = (
        transformers_side.load_reference(folder, family, dtype, DEVICE)
        for dtype in (torch.float32, torch.bfloat16)
    )
    engine = gpu_engine(folder, dtype="bfloat16")
    prompts = draw_prompts([120] * 8)
    outcomes = run(engine, scored(prompts))
    ours_off, theirs_off = [], []
    for each, prompt in zip(scored(prompts), prompts, strict=True):
        expected = of_prompt(exact(prompt), prompt)
        ours_off.append(of_outcome(outcomes[each.id]) - expected)
        theirs_off.append(of_prompt(theirs(prompt), prompt) - expected)
    ours, other = (float(torch.cat(each).square().mean().sqrt()) for each in (ours_off, theirs_off))
    print(f"{family}: log-probabilities in bfloat16 are {ours:.5f} off, transformers' {other:.5f}")
    assert 0 < ours <= NO_WORSE * other


def of_prompt(logits: Tensor, prompt: list[int]) -> Tensor:
    """Log-probabilities of a prompt's tokens but the first, by `logits` [T, V]."""
    rows = logits[:-1].double().cpu().log_softmax(-1)
    return rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]


def of_outcome(outcome: Outcome) -> Tensor:
    assert outcome.error is None and outcome.prompt_logprobs is not None, outcome.error
    entries = outcome.prompt_logprobs[1:]
    return torch.tensor([each.logprob for each in entries if each], dtype=torch.float64)
