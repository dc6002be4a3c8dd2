"""A request that fails ends alone: whatever raises, the others get what they get by themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_tiny import Outcome, request, run, tiny_engine
from torch import Tensor, nn

from tokenspeed.compile.plan import Program
from tokenspeed.compile.runner import Executable
from tokenspeed.engine import build, step
from tokenspeed.engine.engine import Engine
from tokenspeed.request import GenerateRequest, InvalidRequest

MakeEngine = Callable[..., Engine]

POISON = 198
"""Whoever has this token in a step makes trouble."""


class Faulty:
    """The real program, but for steps that hold the poison."""

    def __init__(self, program: Program, module: nn.Module) -> None:
        self._real = Executable(program, module)
        self._is_poisoned = torch.zeros(0, dtype=torch.bool)

    def embed(self, ids: Tensor) -> Tensor:
        self._is_poisoned = ids == POISON
        return self._real.embed(ids)

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        hidden = self._real.forward(x, positions)
        hidden = self.spoil(hidden) if self._is_poisoned.any() else hidden
        return hidden if rows is None else hidden[rows]

    def head(self, rows: Tensor) -> Tensor:
        return self._real.head(rows)

    def spoil(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError


class Raising(Faulty):
    def spoil(self, hidden: Tensor) -> Tensor:
        raise RuntimeError("the kernel slipped\nand fell")


class OutOfMemory(Faulty):
    def spoil(self, hidden: Tensor) -> Tensor:
        raise MemoryError("no room for 8 GiB")


class Spreading(Faulty):
    def spoil(self, hidden: Tensor) -> Tensor:
        hidden = hidden.clone()
        hidden[self._is_poisoned] = torch.nan
        return hidden


class PoisonedOnce(Faulty):
    """The first time that the poison is seen, its keys and values are NaN."""

    is_spent = False

    def embed(self, ids: Tensor) -> Tensor:
        x = super().embed(ids)
        if not self._is_poisoned.any() or self.is_spent:
            return x
        self.is_spent = True
        return torch.where(self._is_poisoned[:, None], torch.nan, x)

    def spoil(self, hidden: Tensor) -> Tensor:
        return hidden


def requests(**victim: Any) -> list[GenerateRequest]:
    """Five bystanders and, in the middle, one who meets the poison after six steps or in its
    prompt.
    """
    found = [
        request(f"b{i}", [20 + i, 90, 9 * i, 3] * (i + 1), seed=i, temperature=i % 2, max_tokens=20)
        for i in range(5)
    ]
    asked = {"logit_bias": {POISON: 100.0}, "max_tokens": 20} | victim
    found.insert(2, request("victim", asked.pop("prompt_ids", [50, 51, 52]), **asked))
    return found


@pytest.fixture(scope="module")
def alone(tiny_model: str) -> dict[str, Outcome]:
    engine = tiny_engine(tiny_model, enable_prefix_caching=False)
    return {each.id: run(engine, [each])[each.id] for each in requests() if each.id != "victim"}


@pytest.fixture(params=[True, False], ids=["serial", "overlap"])
def make(
    request: pytest.FixtureRequest, tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> MakeEngine:
    def make_engine(faulty: type[Faulty], **options: Any) -> Engine:
        monkeypatch.setattr(build, "Executable", faulty)
        return tiny_engine(tiny_model, disable_overlap_schedule=request.param, **options)

    return make_engine


def check_bystanders(found: dict[str, Outcome], alone: dict[str, Outcome]) -> None:
    for name, outcome in alone.items():
        assert found[name].token_ids == outcome.token_ids, name
        assert found[name].finish_reason == outcome.finish_reason


@pytest.mark.parametrize("faulty", [Raising, OutOfMemory, Spreading])
@pytest.mark.parametrize("at", ["decode", "prompt"])
def test_one_fails_others_do_not_notice(
    make: MakeEngine,
    alone: dict[str, Outcome],
    faulty: type[Faulty],
    at: str,
) -> None:
    engine = make(faulty)
    victim = {"prompt_ids": [50, POISON]} if at == "prompt" else {}
    found = run(engine, requests(**victim))
    check_bystanders(found, alone)
    assert found["victim"].finish_reason == "error"
    assert found["victim"].token_ids == ([] if at == "prompt" else [POISON])
    message = {
        Raising: "the engine failed on this request: RuntimeError: the kernel slipped",
        OutOfMemory: "the engine failed on this request: MemoryError: no room for 8 GiB",
        Spreading: "the model produced NaN logits",
    }[faulty]
    assert found["victim"].error == message
    assert engine.stats.nan_aborted == (faulty is Spreading)
    assert engine.stats.num_running == 0 and engine.stats.kv_usage == 0
    again = run(engine, [each for each in requests() if each.id != "victim"])
    check_bystanders(again, alone)


def test_a_broken_chunk_does_not_outlive_its_request(make: MakeEngine) -> None:
    """What NaN keys a chunk left is served to nobody, and those before it still are."""
    engine = make(PoisonedOnce, chunked_prefill_size=16)
    prompt = [*range(1, 19), POISON, *range(20, 60)]
    asked = [request("p", prompt), request("q", prompt[:30], max_tokens=0)]
    broken = run(engine, asked)["p"]
    assert (broken.error, broken.num_cached_tokens) == ("the model produced NaN logits", 0)
    uncached = make(PoisonedOnce, enable_prefix_caching=False)
    run(uncached, asked)
    alone = run(uncached, asked)["p"]
    assert len(alone.token_ids) == 12
    for found in (run(engine, asked)["p"], run(engine, asked)["p"]):
        assert found.num_cached_tokens >= 16
        assert (found.error, found.token_ids) == (None, alone.token_ids)


def test_a_prompt_of_nothing_but_chunks_may_break_too(make: MakeEngine) -> None:
    engine = make(PoisonedOnce)
    asked = [request("p", [50, POISON, 51, 52, 53], max_tokens=0)]
    assert run(engine, asked)["p"].error == "the model produced NaN logits"
    assert run(engine, asked)["p"].error is None


def test_a_scored_prompt_with_nan_is_an_error_too(make: MakeEngine) -> None:
    engine = make(Spreading)
    found = run(engine, [request("p", [50, POISON, 51], prompt_logprobs=0, max_tokens=0)])
    assert found["p"].error == "the model produced NaN logits"


def test_many_may_fail_at_once(make: MakeEngine) -> None:
    engine = make(Raising)
    found = run(engine, [request(f"v{i}", [POISON, i]) for i in range(20)])
    assert {outcome.finish_reason for outcome in found.values()} == {"error"}


def test_a_result_that_cannot_be_fetched_ends_its_requests(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(Raising)

    def no_result(step: Any) -> None:
        raise RuntimeError("device lost")

    with monkeypatch.context() as patch:
        patch.setattr("tokenspeed.engine.step.Step.result", no_result)
        found = run(engine, [request("a", [5, 6]), request("b", [7])])
    assert {outcome.error for outcome in found.values()} == {
        "the engine failed on this request: RuntimeError: device lost"
    }
    assert run(engine, [request("c", [5, 6])])["c"].error is None


@pytest.mark.parametrize("what", ["score_in_chunks", "Fetch"])
def test_a_second_phase_that_raises_once_costs_nobody_a_token(
    make: MakeEngine,
    alone: dict[str, Outcome],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    engine = make(Faulty)
    name = f"tokenspeed.engine.step.{what}"
    real, calls = getattr(step, what), itertools.count()

    def fail_once(*arguments: Any) -> Any:
        if next(calls) == 7:
            raise torch.OutOfMemoryError("no room")
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(name, fail_once)
        found = run(engine, [each for each in requests() if each.id != "victim"])
    assert next(calls) > 8
    check_bystanders(found, alone)


@pytest.mark.parametrize("where", ["launch", "result"])
def test_a_lost_device_ends_the_engine(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    engine = make(Raising)

    def fail(*args: Any) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("tokenspeed.engine.worker.Worker.check_device", fail)
    prompt = [5, POISON] if where == "launch" else [5, 6]
    if where == "result":
        monkeypatch.setattr("tokenspeed.engine.step.Step.result", fail)
    engine.add(request("a", prompt))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        while engine.has_work:
            engine.step()


def test_a_device_that_works_passes_its_check(tiny_model: str) -> None:
    tiny_engine(tiny_model)._worker.check_device()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (request("x", []), "empty"),
        (request("x", [5, 199]), "token 199, but the vocabulary has 199"),
        (request("x", [-1]), "token -1"),
        (request("x", [5] * 250, max_tokens=7), "maximum context length is 256"),
        (request("x", [5] * 257, max_tokens=None), "maximum context length is 256"),
        (request("x", [5], logit_bias={199: 1.0}), "logit_bias names token 199"),
        (request("x", [5], stop_token_ids=(500,)), "stop_token_ids names token 500"),
        (
            GenerateRequest(id="x", prompt_ids=[5], params=request("y", [1]).params, adapter="a"),
            "a",
        ),
    ],
)
def test_invalid_requests_change_nothing(
    tiny_model: str, spec: GenerateRequest, message: str
) -> None:
    engine = tiny_engine(tiny_model)
    with pytest.raises(InvalidRequest, match=message):
        engine.add(spec)
    assert not engine.has_work
    engine.check()


def test_prompt_and_output_may_fill_the_context_exactly(tiny_model: str) -> None:
    engine = tiny_engine(tiny_model, disable_overlap_schedule=False)
    asked = {"ignore_eos": True, "logprobs": None}
    found = run(
        engine,
        [
            request("asked", [5] * 250, max_tokens=6, **asked),
            request("open", [6] * 250, max_tokens=None, **asked),
            request("one", [7] * 255, max_tokens=None, **asked),
        ],
    )
    assert [len(found[name].token_ids) for name in ("asked", "open", "one")] == [6, 6, 1]
