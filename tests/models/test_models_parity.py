"""Every family against transformers: same folder on disk, logits within 1e-4, same greedy ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import VARIANTS, load_ours, load_reference, random_ids, write_checkpoint
from torch import Tensor

TOLERANCE = 1e-4

LONG = {"short_factor": [1.0 + i / 8 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "original_max_position_embeddings": 32, **LLAMA3},
    "llama3-no-original": {"rope_type": "llama3", **LLAMA3},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn-no-original": {"rope_type": "yarn", "factor": 4.0},
    "yarn-betas": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 16,
        "beta_slow": 2,
        "truncate": False,
        "attention_factor": 0.8,
    },
    "yarn-mscale": {"rope_type": "yarn", "factor": 4.0, "mscale": 1.2, "mscale_all_dim": 0.5},
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 32, **LONG},
    "longrope-factor": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "factor": 3.0,
        **LONG,
    },
}


def spell(rope: dict[str, Any], spelling: str) -> dict[str, Any]:
    """The same rope as old and new config files say it."""
    if spelling == "parameters":
        return {"rope_parameters": {**rope, "rope_theta": 500.0}}
    rope = dict(rope)
    if spelling == "type":
        rope["type"] = rope.pop("rope_type")
    return {"rope_theta": 500.0, "rope_scaling": rope}


def greedy_by_recomputing(
    logits: Callable[[list[int]], Tensor], ids: list[int], count: int
) -> list[int]:
    out: list[int] = []
    for _ in range(count):
        out.append(int(logits(ids + out)[-1].argmax()))
    return out


@pytest.mark.parametrize("name", VARIANTS)
def test_family(tmp_path: Path, name: str) -> None:
    family, fields = VARIANTS[name]
    folder = write_checkpoint(tmp_path / name, family, **fields)
    reference = load_reference(folder, family)
    _, sequence = load_ours(folder)
    ids = random_ids(100)
    assert (sequence().feed(ids) - reference(ids)).abs().max() < TOLERANCE
    prompt = random_ids(9, seed=1)
    assert sequence().greedy(prompt, 64) == greedy_by_recomputing(reference, prompt, 64)


@pytest.mark.parametrize("spelling", ["type", "rope_type", "parameters"])
@pytest.mark.parametrize("name", ROPES)
def test_rope(tmp_path: Path, name: str, spelling: str) -> None:
    """At every position of a prompt as long as the config's own positions."""
    folder = write_checkpoint(tmp_path / name, "llama", **spell(ROPES[name], spelling))
    reference = load_reference(folder, "llama")
    _, sequence = load_ours(folder)
    ids = random_ids(128)
    assert (sequence().feed(ids) - reference(ids)).abs().max() < TOLERANCE


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", ["linear", "dynamic", "llama3", "yarn", "longrope"])
def test_rope_of_other_families(tmp_path: Path, family: str, name: str) -> None:
    fields = spell(ROPES[name], "rope_type") | {"head_dim": 16}
    folder = write_checkpoint(tmp_path / name, family, **fields)
    reference = load_reference(folder, family)
    _, sequence = load_ours(folder)
    prompt = random_ids(64)
    assert (sequence().feed(prompt) - reference(prompt)).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", [name for name in ROPES if name != "dynamic"])
def test_rope_greedy(tmp_path: Path, name: str) -> None:
    """64 tokens from a cache, all on one side of the length at which longrope changes."""
    folder = write_checkpoint(tmp_path / name, "llama", **spell(ROPES[name], "parameters"))
    reference = load_reference(folder, "llama")
    _, sequence = load_ours(folder)
    prompt = random_ids(40, seed=2)
    assert sequence().greedy(prompt, 64) == greedy_by_recomputing(reference, prompt, 64)


def test_longrope_chooses_once_from_max_model_len(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "long", "llama", **spell(ROPES["longrope"], "rope_type"))
    reference = load_reference(folder, "llama")
    short, long = random_ids(32), random_ids(33)
    _, short_sequence = load_ours(folder, max_model_len=32)
    _, long_sequence = load_ours(folder, max_model_len=33)
    assert (short_sequence().feed(short) - reference(short)).abs().max() < TOLERANCE
    assert (long_sequence().feed(long) - reference(long)).abs().max() < TOLERANCE
    assert (long_sequence().feed(short) - reference(short)).abs().max() > 0.01


def test_dynamic_beyond_the_original_length(tmp_path: Path) -> None:
    """Frequencies fixed from max_model_len are transformers' for a prompt of that length; up to the
    original length, a model that serves no more is equal everywhere.
    """
    folder = write_checkpoint(tmp_path / "dyn", "llama", **spell(ROPES["dynamic"], "rope_type"))
    ids = random_ids(300)
    _, sequence = load_ours(folder, max_model_len=300)
    assert (sequence().feed(ids) - load_reference(folder, "llama")(ids)).abs().max() < TOLERANCE
    for max_model_len in (None, 50, 128):
        _, sequence = load_ours(folder, max_model_len)
        reference = load_reference(folder, "llama")
        assert sequence().greedy(ids[:50], 64) == greedy_by_recomputing(reference, ids[:50], 64)


def test_chunks_are_the_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "chunks", "qwen3")
    _, sequence = load_ours(folder)
    ids = random_ids(60)
    chunked = sequence()
    logits = torch.cat([chunked.feed(ids[a : a + 7]) for a in range(0, 60, 7)])
    assert (logits - sequence().feed(ids)).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_near_float32(tmp_path: Path, family: str) -> None:
    folder = write_checkpoint(tmp_path / family, family)
    ids = random_ids(60)
    wide, narrow = (load_ours(folder, dtype=d)[1]() for d in (torch.float32, torch.bfloat16))
    expected, logits = wide.feed(ids), narrow.feed(ids)
    assert logits.dtype == torch.bfloat16
    error = (logits.float() - expected).norm() / expected.norm()
    assert error < 0.05


def test_config_as_transformers_writes_it_is_read(tmp_path: Path) -> None:
    """transformers 5 writes `dtype` and `rope_parameters`; both are understood."""
    folder = write_checkpoint(tmp_path / "plain", "llama")
    config = json.loads((folder / "config.json").read_text())
    assert "rope_parameters" in config and "rope_theta" not in config
    load_ours(folder)
