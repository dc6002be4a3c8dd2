"""FlashInfer beside Triton in whole engines, in bfloat16: prompts anew, in chunks, behind a prefix
that is cached, alone and in a batch. No way is further from float32 than another. All of it with a
cache of bfloat16, and with one of fp8.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import Outcome, run
from flashinfer_cases import runs_flashinfer
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
from tokenspeed.kernels.attention_flashinfer import GroupPrefill

pytestmark = [
    *GPU_ENGINE_MARKS,
    pytest.mark.skipif(
        not runs_flashinfer(),
        reason="needs a GPU of compute capability 9.0, flashinfer and its built kernels",
    ),
]

PROMPTS = draw_prompts((300, 700, 5, 1500, 2048))
LONGER = [
    [*prompt, *more]
    for prompt, more in zip(PROMPTS, draw_prompts([320] * len(PROMPTS), seed=1), strict=True)
]
BOTH = [*scored(PROMPTS), *forced(PROMPTS)]

AS_FAR = 1.2
"""Two roundings of one model have the same distance from float32, but for chance;"""
APART = 1.6
"""and from each other at most the root of two times that."""
APART_IN_FP8 = 0.8
"""Both read the same rounded keys, which are most of what is off."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("backends") / "qwen3"
    made: Path = importlib.import_module("checkpoints").write_checkpoint(
        target, "qwen3", **WIDE_HEADS
    )
    return made


@pytest.fixture(scope="module", params=["bfloat16", "fp8"])
def cache(request: pytest.FixtureRequest) -> str:
    """The cache's dtype."""
    kind: str = request.param
    return kind


def make(folder: Path, backend: str, cache: str, **options: Any) -> Engine:
    options = {"dtype": "bfloat16", "kv_cache_dtype": cache, **options}
    return gpu_engine(folder, attention_backend=backend, **options)


def make_exact(folder: Path) -> Engine:
    return make(folder, "triton", "auto", dtype="float32")


@pytest.fixture(scope="module")
def exact(folder: Path) -> dict[str, Outcome]:
    """In float32, by Triton."""
    with wide_products():
        return run(make_exact(folder), BOTH)


@pytest.fixture(scope="module")
def by_triton(folder: Path, cache: str) -> dict[str, Outcome]:
    return run(make(folder, "triton", cache), BOTH)


@pytest.fixture(scope="module")
def engine(folder: Path, cache: str) -> Engine:
    """With FlashInfer; no prefix is cached."""
    return make(folder, "flashinfer", cache, enable_prefix_caching=False)


@pytest.fixture
def plans(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often FlashInfer plans rows with a past (paged), and rows without (ragged)."""
    found: Counter[str] = Counter()
    for kind in ("paged", "ragged"):
        plan = getattr(GroupPrefill, f"_plan_{kind}")

        def counted(*given: Any, kind: str = kind, plan: Any = plan) -> None:
            found[kind] += 1
            plan(*given)

        monkeypatch.setattr(GroupPrefill, f"_plan_{kind}", counted)
    yield found


def assert_as_good(
    cache: str,
    found: dict[str, Outcome],
    by_triton: dict[str, Outcome],
    exact: dict[str, Outcome],
) -> None:
    """As far from float32 as Triton is, and not much further from Triton."""
    usual, own = distance(by_triton, exact), distance(found, exact)
    apart = distance(found, by_triton)
    print(f"off float32: triton {usual:.5f}, this {own:.5f}; apart {apart:.5f}")
    assert 0 < usual < (0.2 if cache == "bfloat16" else 1.0), "this dtype says nothing here"
    assert own <= AS_FAR * usual
    assert apart <= (APART if cache == "bfloat16" else APART_IN_FP8) * usual


def test_prompts_anew(
    cache: str,
    engine: Engine,
    plans: Counter[str],
    by_triton: dict[str, Outcome],
    exact: dict[str, Outcome],
) -> None:
    plans.clear()
    assert_as_good(cache, run(engine, BOTH), by_triton, exact)
    assert plans["ragged"] > 0


def test_alone(
    cache: str,
    engine: Engine,
    plans: Counter[str],
    by_triton: dict[str, Outcome],
    exact: dict[str, Outcome],
) -> None:
    plans.clear()
    found = {each.id: run(engine, [each])[each.id] for each in BOTH}
    assert_as_good(cache, found, by_triton, exact)
    assert plans == {"ragged": 8}, "each prompt of 256 tokens and more"


def test_in_chunks(
    folder: Path,
    cache: str,
    plans: Counter[str],
    by_triton: dict[str, Outcome],
    exact: dict[str, Outcome],
) -> None:
    """Long enough for FlashInfer: those behind the first have a past."""
    options = {"enable_prefix_caching": False, "chunked_prefill_size": 400}
    engine = make(folder, "flashinfer", cache, **options)
    plans.clear()
    assert_as_good(cache, run(engine, BOTH), by_triton, exact)
    assert plans["paged"] > 10


def test_behind_a_cached_prefix(folder: Path, cache: str, plans: Counter[str]) -> None:
    longer = forced(LONGER)
    with wide_products():
        exact = run(make_exact(folder), longer)
    anew = run(make(folder, "triton", cache), longer)
    engine = make(folder, "flashinfer", cache)
    run(engine, forced(PROMPTS, 1))
    plans.clear()
    found = run(engine, longer)
    assert plans["paged"] > 0
    for i, prompt in enumerate(PROMPTS):
        assert found[f"forced{i}"].num_cached_tokens == len(prompt) // 16 * 16
    assert_as_good(cache, found, anew, exact)
