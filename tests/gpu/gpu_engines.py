"""What tests of engines on a GPU share: how an engine is made there, requests whose text is forced,
and how far two runs of them are apart.

Two runs of one model differ by float rounding. In float32 that is less than any margin that is
tested; in bfloat16 it is measured against a run in float32, and nothing may be further off.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import Outcome, request, tiny_engine
from torch import Tensor

from tokenspeed.engine.engine import Engine
from tokenspeed.request import GenerateRequest

DEVICE = "cuda"

GPU_ENGINE_MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore"),  # of what FlashInfer and transformers import
]

WIDE_HEADS = {"head_dim": 128, "max_position_embeddings": 4096}
"""Fields of a tiny checkpoint whose prompts FlashInfer attends."""

EXACT = 1e-3
"""Log-probabilities in float32, of logits from -10 to 10."""

FORCED = 64
"""The token that every step of a forced text brings, whatever is likely."""


def gpu_engine(folder: object, **options: Any) -> Engine:
    """At -O0 unless another level is asked for; None: the default."""
    own = {"device": DEVICE, "level": 0, "block_size": 16, "max_total_tokens": 32768}
    return tiny_engine(str(folder), **{**own, "max_num_seqs": 16, **options})


@contextlib.contextmanager
def wide_products() -> Iterator[None]:
    """float32 is multiplied as float32, not as TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def draw_prompts(lengths: Sequence[int], seed: int = 0) -> list[list[int]]:
    """Of a vocabulary of 128 tokens, of which the first are special."""
    numbers = random.Random(seed)
    return [[numbers.randrange(3, 128) for _ in range(length)] for length in lengths]


def greedy(prompts: Iterable[list[int]], count: int = 24) -> list[GenerateRequest]:
    """Free text, `count` tokens of it."""
    params = {"max_tokens": count, "ignore_eos": True, "logprobs": 1}
    return [request(f"greedy{i}", ids, **params) for i, ids in enumerate(prompts)]


def forced(prompts: Iterable[list[int]], count: int = 12) -> list[GenerateRequest]:
    """The same text in every run, so that the log-probabilities of each of its steps compare."""
    params = {"max_tokens": count, "ignore_eos": True, "logprobs": 5, "logit_bias": {FORCED: 100.0}}
    return [request(f"forced{i}", ids, **params) for i, ids in enumerate(prompts)]


def scored(prompts: Iterable[list[int]]) -> list[GenerateRequest]:
    """The prompts alone."""
    params = {"max_tokens": 0, "prompt_logprobs": 2, "logprobs": None}
    return [request(f"scored{i}", ids, **params) for i, ids in enumerate(prompts)]


def log_probs(outcomes: Mapping[str, Outcome]) -> Tensor:
    """All that the requests brought: of each position, the chosen token's and the largest ones."""
    values = []
    for name in sorted(outcomes):
        outcome = outcomes[name]
        assert outcome.error is None, f"{name}: {outcome.error}"
        for entry in [*(outcome.prompt_logprobs or []), *outcome.logprobs]:
            if entry is not None:
                values += [entry.logprob, *(value for _, value in entry.top)]
    assert values, "nobody asked for log-probabilities"
    return torch.tensor(values, dtype=torch.float64)


def distance(found: Mapping[str, Outcome], expected: Mapping[str, Outcome]) -> float:
    """Between the log-probabilities of two runs: the root of the mean square."""
    assert found.keys() == expected.keys()
    return float((log_probs(found) - log_probs(expected)).square().mean().sqrt())


def assert_same(found: Mapping[str, Outcome], expected: Mapping[str, Outcome]) -> None:
    """In float32: the same tokens, and log-probabilities but for rounding."""
    assert found.keys() == expected.keys()
    for name, outcome in found.items():
        assert outcome.error is None, f"{name}: {outcome.error}"
        assert outcome.token_ids == expected[name].token_ids, name
    torch.testing.assert_close(log_probs(found), log_probs(expected), rtol=0, atol=EXACT)


def assert_follows(
    outcome: Outcome, prompt: list[int], logits: Callable[[list[int]], Tensor]
) -> None:
    """In float32: fed the prompt and these tokens, the reference's likeliest token is the one that
    comes next (or as likely, but for rounding), with the same log-probability.
    """
    assert outcome.error is None, outcome.error
    ids = outcome.token_ids
    rows = logits(prompt + ids)[len(prompt) - 1 : -1].double().cpu()
    chosen = rows.gather(1, torch.tensor(ids)[:, None])[:, 0]
    behind = rows.max(-1).values - chosen
    assert behind.max() < EXACT, f"token {int(behind.argmax())} is another one: {behind.max():.4f}"
    found = torch.tensor([entry.logprob for entry in outcome.logprobs], dtype=torch.float64)
    torch.testing.assert_close(found, chosen - rows.logsumexp(-1), rtol=0, atol=EXACT)


SMALL_QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
"""The widths of Qwen3-0.6B, with fewer layers."""


def write_small_qwen3(folder: Path) -> Path:
    """Its config.json; weights are made up by the engine (--load-format dummy)."""
    (folder / "config.json").write_text(json.dumps(SMALL_QWEN3))
    return folder
