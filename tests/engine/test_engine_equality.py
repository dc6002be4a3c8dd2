"""However a request is run, it gets the same: alone, batched, in chunks, from a warm prefix cache,
after preemption, with a step in flight. Equal: ids, reasons, and logprobs within 1e-4.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from engine_tiny import Outcome, request, run, tiny_engine

from tokenspeed.request import GenerateRequest

BLOCK = 4
LENGTHS = (1, 3, 4, 5, 8, 17, 30, 41)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "logit_bias": {7: 4.0}},
    {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "top_k": 9, "logprobs": 0, "allowed_token_ids": tuple(range(9, 99))},
    {"min_tokens": 9, "logit_bias": {7: 30.0}, "prompt_logprobs": 2},
    {"temperature": 1.5, "min_p": 0.02, "logit_bias": {17: -100.0, 60: 2.5}, "logprobs": None},
    {
        "stop_token_ids": tuple(range(40, 60)),
        "logprobs": 20,
        "top_p": 0.9,
        "bad_token_ids": tuple((first, second) for first in range(8, 99) for second in (7, 61)),
    },
    {"temperature": 1.0, "frequency_penalty": 1.5, "ignore_eos": True, "prompt_logprobs": 0},
]


def requests() -> list[GenerateRequest]:
    prompts = np.random.default_rng(11)
    return [
        request(
            f"r{i}",
            prompts.integers(8, 199, LENGTHS[i]).tolist(),
            seed=100 + i,
            **{"max_tokens": 24, **OPTIONS[i]},
        )
        for i in range(len(OPTIONS))
    ]


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> dict[str, Outcome]:
    """Each request by itself: nothing else runs, nothing is cached."""
    engine = tiny_engine(tiny_model, enable_prefix_caching=False)
    return {each.id: run(engine, [each])[each.id] for each in requests()}


def assert_equal(
    found: dict[str, Outcome], expected: dict[str, Outcome], tolerance: float = 1e-4
) -> None:
    assert found.keys() == expected.keys()
    for name, outcome in found.items():
        other = expected[name]
        assert outcome.token_ids == other.token_ids, name
        assert outcome.finish_reason == other.finish_reason, name
        assert outcome.stop_token == other.stop_token, name
        assert_close(outcome.logprobs, other.logprobs, tolerance)
        assert_close(outcome.prompt_logprobs or [], other.prompt_logprobs or [], tolerance)


def assert_close(found: list[Any], expected: list[Any], tolerance: float) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        assert one.token_id == other.token_id
        assert one.logprob == pytest.approx(other.logprob, abs=tolerance)
        assert [value for _, value in one.top] == pytest.approx(
            [value for _, value in other.top], abs=tolerance
        )


def test_the_requests_show_something(alone: dict[str, Outcome]) -> None:
    """Ends of both kinds, and as many entries as were asked for."""
    reasons = {str(outcome.finish_reason) for outcome in alone.values()}
    assert reasons == {"stop", "length"}
    assert alone["r1"].stop_token == 7 and alone["r6"].stop_token in range(40, 60)
    assert len(alone["r4"].token_ids) == 10, "the ninth token is the last that may not be eos"
    for each in requests():
        outcome, params = alone[each.id], each.params
        if params.logprobs is not None:
            assert len(outcome.logprobs) == len(outcome.token_ids)
            assert all(len(entry.top) == params.logprobs for entry in outcome.logprobs)
        if params.prompt_logprobs is not None:
            assert outcome.prompt_logprobs is not None and outcome.prompt_logprobs[0] is None
            scored = [entry.token_id for entry in outcome.prompt_logprobs[1:] if entry]
            assert scored == each.prompt_ids[1:]


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "overlap"])
@pytest.mark.parametrize("chunk", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 4096])
def test_batched_and_chunked(
    tiny_model: str, alone: dict[str, Outcome], chunk: int, serial: bool
) -> None:
    engine = tiny_engine(
        tiny_model, chunked_prefill_size=chunk, disable_overlap_schedule=serial, block_size=BLOCK
    )
    assert_equal(run(engine, requests()), alone)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "overlap"])
def test_prefix_warm(tiny_model: str, alone: dict[str, Outcome], serial: bool) -> None:
    engine = tiny_engine(tiny_model, disable_overlap_schedule=serial)
    run(engine, requests())
    warm = run(engine, requests())
    assert_equal(warm, alone)
    assert warm["r6"].num_cached_tokens >= 28
    assert warm["r4"].num_cached_tokens == 0, "a scored prompt is computed, not read"


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "overlap"])
@pytest.mark.parametrize("chunk", [5, 4096])
def test_preempted(tiny_model: str, alone: dict[str, Outcome], chunk: int, serial: bool) -> None:
    engine = tiny_engine(
        tiny_model,
        max_total_tokens=100,
        chunked_prefill_size=chunk,
        disable_overlap_schedule=serial,
        enable_prefix_caching=chunk == 5,
    )
    assert_equal(run(engine, requests()), alone)
    assert engine.stats.preemptions > 0


@pytest.mark.parametrize("prefill_first", [False, True])
def test_fewer_slots_than_requests(
    tiny_model: str, alone: dict[str, Outcome], prefill_first: bool
) -> None:
    engine = tiny_engine(
        tiny_model,
        max_num_seqs=3,
        chunked_prefill_size=16,
        disable_overlap_schedule=False,
        prefill_first=prefill_first,
    )
    assert_equal(run(engine, requests()), alone)


def test_an_abort_leaves_the_others_alone(tiny_model: str, alone: dict[str, Outcome]) -> None:
    engine = tiny_engine(tiny_model, chunked_prefill_size=7, disable_overlap_schedule=False)
    outcomes = {each.id: Outcome() for each in requests()}
    for each in requests():
        engine.add(each)
    deltas, steps = engine.abort(["r2", "nobody"]), 0  # one that waits
    while engine.has_work:
        for delta in deltas + engine.step():
            outcomes[delta.request_id].push(delta)
        steps += 1
        deltas = engine.abort({10: ["r7"], 16: ["r0", "r1"]}.get(steps, []))
    engine.check()
    assert {str(outcomes[name].finish_reason) for name in ("r2", "r7")} == {"abort"}
    kept = [name for name in outcomes if str(outcomes[name].finish_reason) != "abort"]
    assert len(kept) >= 4
    assert_equal({name: outcomes[name] for name in kept}, {name: alone[name] for name in kept})
    assert engine.stats.num_running == engine.stats.num_waiting == engine.stats.kv_usage == 0
