"""A cache of fp8: however a request is run, it reads the same rounded keys and values.

A float's rounding may move a number to the next one in fp8, and a log-probability by 1e-3; keys
that are read as they were before they were rounded move it by 1, and change tokens.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_tiny import Outcome, request, run, tiny_engine
from safetensors.numpy import load_file, save_file
from test_engine_equality import assert_equal

from tokenspeed.engine.engine import Engine
from tokenspeed.engine.worker import Worker
from tokenspeed.request import GenerateRequest

LENGTHS = (1, 4, 5, 17, 30, 41)
CLOSE = 5e-3


def requests() -> list[GenerateRequest]:
    prompts = np.random.default_rng(13)
    drawn = [prompts.integers(8, 199, length).tolist() for length in LENGTHS]
    return [
        request(f"r{i}", ids, max_tokens=16, ignore_eos=True, prompt_logprobs=2 if i == 3 else None)
        for i, ids in enumerate(drawn)
    ]


def make(folder: str, **options: Any) -> Engine:
    return tiny_engine(folder, **{"kv_cache_dtype": "fp8", **options})


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> dict[str, Outcome]:
    """Each request by itself: nothing else runs, nothing is cached."""
    engine = make(tiny_model, enable_prefix_caching=False)
    return {each.id: run(engine, [each])[each.id] for each in requests()}


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, 4096])
def test_batched_and_chunked(
    tiny_model: str, alone: dict[str, Outcome], chunk: int, serial: bool
) -> None:
    options = {"chunked_prefill_size": chunk, "disable_overlap_schedule": serial}
    assert_equal(run(make(tiny_model, **options), requests()), alone, CLOSE)


def test_prefix_warm(tiny_model: str, alone: dict[str, Outcome]) -> None:
    engine = make(tiny_model)
    run(engine, requests())
    warm = run(engine, requests())
    assert_equal(warm, alone, CLOSE)
    assert warm["r5"].num_cached_tokens >= 40


@pytest.mark.parametrize("chunk", [5, 4096])
def test_preempted(tiny_model: str, alone: dict[str, Outcome], chunk: int) -> None:
    engine = make(
        tiny_model,
        max_total_tokens=72,
        chunked_prefill_size=chunk,
        enable_prefix_caching=chunk == 5,
    )
    assert_equal(run(engine, requests()), alone, CLOSE)
    assert engine.stats.preemptions > 0


def test_it_is_near_the_cache_of_the_model_s_dtype(
    tiny_model: str, alone: dict[str, Outcome]
) -> None:
    """Near, and not the same: something was rounded."""
    exact = run(make(tiny_model, kv_cache_dtype="auto"), requests())["r3"].prompt_logprobs
    rounded = alone["r3"].prompt_logprobs
    assert exact is not None and rounded is not None
    pairs = [(a.logprob, b.logprob) for a, b in zip(exact, rounded, strict=True) if a and b]
    apart = [abs(a - b) for a, b in pairs]
    assert max(apart) > CLOSE and sum(apart) < 0.5 * len(apart)


@pytest.mark.parametrize(
    ("name", "shown", "share"),
    [("fp8", "fp8_e4m3", 4), ("fp8_e5m2", "fp8_e5m2", 4), ("bfloat16", "bfloat16", 2)],
)
def test_pages_take_less(tiny_model: str, name: str, shown: str, share: int) -> None:
    """And as many more of them are planned from the same memory."""
    engine = make(tiny_model, kv_cache_dtype=name)
    worker = engine._worker
    assert isinstance(worker, Worker)
    whole = make(tiny_model, kv_cache_dtype="auto")._worker
    assert isinstance(whole, Worker)
    assert pool_bytes(whole) == share * pool_bytes(worker)
    assert engine.ready.kv_cache_dtype == shown
    assert engine.ready.summary.endswith(f"KV cache of 1024 tokens in {shown}")
    assert len(run(engine, requests()[:2])["r1"].token_ids) == 16


def pool_bytes(worker: Worker) -> int:
    pool: Any = worker._attention._pool  # type: ignore[union-attr]
    return sum(each.nbytes for each in (*pool.keys, *pool.values))


def test_scales_of_a_checkpoint_are_used(tiny_model: str, tmp_path: Path) -> None:
    """By a cache of fp8 alone."""
    tensors = load_file(Path(tiny_model, "model.safetensors"))
    for layer in range(3):
        for kind in "kv":
            name = f"model.layers.{layer}.self_attn.{kind}_proj.{kind}_scale"
            tensors[name] = np.array([2.0**-layer if kind == "k" else 0.1], dtype=np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    shutil.copy(Path(tiny_model, "config.json"), tmp_path)
    pools = {}
    for name in ("fp8", "auto"):
        engine = make(str(tmp_path), kv_cache_dtype=name)
        pools[name] = engine._worker._attention._pool  # type: ignore[union-attr, attr-defined]
        assert len(run(engine, requests()[:2])["r1"].token_ids) == 16
    assert pools["fp8"].k_scales == [1.0, 0.5, 0.25]
    assert pools["fp8"].v_scales == pytest.approx([0.1] * 3)
    assert pools["auto"].k_scales == pools["auto"].v_scales == [1.0] * 3
