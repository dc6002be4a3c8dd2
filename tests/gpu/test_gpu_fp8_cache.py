"""A cache of fp8 on a GPU, in float32, by Triton's kernels and CUDA graphs: however a request is
run, it reads the same rounded keys and values, which are those of torch's attention.

A float's rounding may move a number that is stored to the next one in fp8. So runs are not equal:
they are much closer to each other than to a run whose cache is not rounded.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import Outcome, run
from gpu_engines import (
    GPU_ENGINE_MARKS,
    WIDE_HEADS,
    distance,
    draw_prompts,
    forced,
    gpu_engine,
    scored,
    wide_products,
)

from tokenspeed.engine.engine import Engine

pytestmark = GPU_ENGINE_MARKS

PROMPTS = draw_prompts((47, 63, 79, 1, 3, 17, 130, 300, 700), seed=7)
REQUESTS = [*scored(PROMPTS), *forced(PROMPTS)]

CLOSE = 0.5
"""Of the distance that rounding the cache makes."""


@pytest.fixture(scope="module", autouse=True)
def no_tf32() -> Iterator[None]:
    with wide_products():
        yield


@pytest.fixture(scope="module", params=[64, 128], ids="head size {}".format)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("fp8") / "qwen3"
    fields = {**WIDE_HEADS, "head_dim": request.param}
    made: Path = importlib.import_module("checkpoints").write_checkpoint(target, "qwen3", **fields)
    return made


def make(folder: Path, cache: str = "fp8", **options: Any) -> Engine:
    own = {"dtype": "float32", "level": None, "kv_cache_dtype": cache}
    return gpu_engine(folder, **{**own, "attention_backend": "triton", **options})


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Outcome]:
    engine = make(folder, enable_prefix_caching=False)
    assert "CUDA graphs" in engine.ready.summary and "fp8_e4m3" in engine.ready.summary
    return {each.id: run(engine, [each])[each.id] for each in REQUESTS}


@pytest.fixture(scope="module")
def rounding(folder: Path, alone: dict[str, Outcome]) -> float:
    """How far the cache's rounding moves log-probabilities."""
    far = distance(run(make(folder, "auto"), REQUESTS), alone)
    print(f"fp8 is off by {far:.5f}")
    assert 1e-4 < far < 1.0
    return far


def assert_close(found: dict[str, Outcome], alone: dict[str, Outcome], rounding: float) -> None:
    apart = distance(found, alone)
    print(f"apart {apart:.6f}, of {rounding:.5f}")
    assert apart <= CLOSE * rounding


def test_batched_and_in_chunks(folder: Path, alone: dict[str, Outcome], rounding: float) -> None:
    for options in ({}, {"chunked_prefill_size": 48}):
        engine = make(folder, enable_prefix_caching=False, **options)
        assert_close(run(engine, REQUESTS), alone, rounding)


def test_from_the_prefix_cache(folder: Path, alone: dict[str, Outcome], rounding: float) -> None:
    engine = make(folder)
    run(engine, REQUESTS)
    warm = run(engine, REQUESTS)
    assert warm["forced8"].num_cached_tokens >= 672
    assert_close(warm, alone, rounding)


def test_like_the_torch_backend(folder: Path, alone: dict[str, Outcome], rounding: float) -> None:
    engine = make(folder, attention_backend="torch", level=0)
    assert_close(run(engine, REQUESTS), alone, rounding)


@pytest.mark.parametrize("cache", ["fp8_e5m2", "bfloat16"])
def test_other_dtypes(folder: Path, cache: str) -> None:
    exact = run(make(folder, "auto"), REQUESTS)
    off = {kind: distance(run(make(folder, kind), REQUESTS), exact) for kind in (cache, "fp8")}
    print(off)
    finer = cache == "bfloat16"
    assert (off[cache] < off["fp8"]) == finer, "two bits of mantissa, three, and seven"
