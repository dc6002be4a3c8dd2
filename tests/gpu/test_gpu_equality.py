"""At the default level, with CUDA graphs, in float32: however a request is run, it gets the same,
and what it gets is transformers'.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import Outcome, run
from gpu_engines import (
    DEVICE,
    GPU_ENGINE_MARKS,
    WIDE_HEADS,
    assert_follows,
    assert_same,
    draw_prompts,
    forced,
    gpu_engine,
    greedy,
    wide_products,
)

from tokenspeed.engine.engine import Engine

pytestmark = GPU_ENGINE_MARKS

LENGTHS = (47, 63, 79, 95, 47, 63, 79, 95, 1, 3, 17, 130, 300, 700)
"""The first soon need another page each, and then one more."""

PROMPTS = draw_prompts(LENGTHS, seed=7)
"""No two tokens are closer than 0.004 at any step of the greedy texts."""

REQUESTS = [*greedy(PROMPTS), *forced(PROMPTS)]


@pytest.fixture(scope="module", autouse=True)
def no_tf32() -> Iterator[None]:
    with wide_products():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("equality") / "qwen3"
    made: Path = importlib.import_module("checkpoints").write_checkpoint(
        target, "qwen3", **WIDE_HEADS
    )
    return made


def make(folder: Path, **options: Any) -> Engine:
    """All of them run one program of the compile cache, whatever their pools are."""
    engine = gpu_engine(folder, dtype="float32", level=None, **options)
    assert "CUDA graphs" in engine.ready.summary, engine.ready.summary
    return engine


@pytest.fixture(scope="module")
def plain(folder: Path) -> Engine:
    return make(folder, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def alone(plain: Engine) -> dict[str, Outcome]:
    """Each request by itself: nothing else runs, nothing is cached."""
    return {each.id: run(plain, [each])[each.id] for each in REQUESTS}


def test_the_tokens_of_transformers(folder: Path, alone: dict[str, Outcome]) -> None:
    library = importlib.import_module("checkpoints")
    reference = library.load_reference(folder, "qwen3", device=DEVICE)
    for i, prompt in enumerate(PROMPTS):
        assert_follows(alone[f"greedy{i}"], prompt, reference)
    assert len({tuple(each.token_ids) for each in alone.values()}) > len(PROMPTS) // 2


def test_batched(plain: Engine, alone: dict[str, Outcome]) -> None:
    assert_same(run(plain, REQUESTS), alone)


def test_in_chunks_and_from_the_prefix_cache(folder: Path, alone: dict[str, Outcome]) -> None:
    """Chunks of many sizes: what a step's decodes leave of its budget."""
    engine = make(folder, chunked_prefill_size=48)
    assert_same(run(engine, REQUESTS), alone)
    warm = run(engine, REQUESTS)
    assert_same(warm, alone)
    assert warm[f"greedy{LENGTHS.index(700)}"].num_cached_tokens >= 672


@pytest.mark.parametrize("cached", [True, False], ids=["cached", "anew"])
def test_preempted(folder: Path, alone: dict[str, Outcome], cached: bool) -> None:
    """With and without pages of its own in the prefix cache when it comes back."""
    engine = make(folder, max_total_tokens=768, max_model_len=768, enable_prefix_caching=cached)
    assert_same(run(engine, REQUESTS), alone)
    assert engine.stats.preemptions > 0
