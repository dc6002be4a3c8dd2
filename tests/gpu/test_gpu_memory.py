"""With nearly all of a GPU's memory for weights and KV pool, full steps find room for the rest."""

from __future__ import annotations

import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import request, run
from gpu_engines import DEVICE, GPU_ENGINE_MARKS, SMALL_QWEN3, gpu_engine, write_small_qwen3

from tokenspeed.engine import on_device
from tokenspeed.engine.trial import Needs, try_out
from tokenspeed.request import GenerateRequest

pytestmark = GPU_ENGINE_MARKS

SHARE = 0.95
ROWS, BUDGET = 256, 16384
GIB = 1 << 30


def requests() -> list[GenerateRequest]:
    """Long prompts, one in four scored, so that every full step has scored rows; all outputs with
    log-probabilities and penalties, for which logits are copied in float32.
    """
    found = []
    for i in range(ROWS):
        ids = [(7919 * i + 31 * j) % SMALL_QWEN3["vocab_size"] for j in range(1500 + 8 * i)]
        asked = {"logprobs": 20, "repetition_penalty": 1.1, "temperature": 0.8 * (i % 2)}
        scores = {"prompt_logprobs": 3} if i % 4 == 0 else {}
        asked |= {"max_tokens": 24, "ignore_eos": True, **scores}
        found.append(request(f"r{i}", ids, seed=i, **asked))
    return found


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> list[Needs]:
    """What the start reserves beside weights and pages."""
    found: list[Needs] = []

    def noted(*given: Any, **named: Any) -> Needs:
        found.append(try_out(*given, **named))
        return found[-1]

    monkeypatch.setattr(on_device, "try_out", noted)
    return found


def test_nearly_all_of_the_memory(
    tmp_path: Path, needs: list[Needs], caplog: pytest.LogCaptureFixture
) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    total = torch.cuda.mem_get_info()[1]
    caplog.set_level(logging.WARNING, logger="tokenspeed")
    engine = gpu_engine(
        write_small_qwen3(tmp_path),
        **{"load_format": "dummy", "level": None, "gpu_memory_utilization": SHARE},
        **{"max_total_tokens": None, "max_num_seqs": ROWS, "chunked_prefill_size": BUDGET},
    )
    free_when_ready = torch.cuda.mem_get_info()[0]
    outcomes = run(engine, requests())
    assert all(outcome.error is None for outcome in outcomes.values())
    assert {len(outcome.token_ids) for outcome in outcomes.values()} == {24}
    scores = outcomes["r0"].prompt_logprobs
    assert scores is not None and len(scores) == 1500

    ready, config = engine.ready, SMALL_QWEN3
    token_bytes = 2 * 2 * config["num_key_value_heads"] * config["head_dim"]
    pool = ready.num_pages * ready.block_size * token_bytes * config["num_hidden_layers"]
    weights = 2 * engine._worker._executable.num_weights
    (need,), free = needs, torch.cuda.mem_get_info()[0]
    print(
        f"{DEVICE} of {total / GIB:.1f} GiB: pool {pool / GIB:.2f}, weights {weights / GIB:.2f}, "
        f"reserved for steps {need.activations / GIB:.2f} and graphs {need.graphs / GIB:.2f}; free "
        f"when ready {free_when_ready / GIB:.2f}, at the end {free / GIB:.2f}"
    )
    assert need.activations > 0 and need.graphs > 0
    assert pool + weights + need.total <= SHARE * total
    assert total - free <= SHARE * total, "steps took more than was reserved for them"
    assert pool > 0.8 * total, "the pool is not what fills the memory"
    assert torch.cuda.memory_stats()["num_alloc_retries"] == retries, "memory had run out"
    assert "raised" not in caplog.text and "no memory" not in caplog.text, caplog.text
