"""The whole path at -O0: few layers captured, the plan repeated, run on weights bound by path."""

from __future__ import annotations

import functools
import logging
import struct
import weakref

import compile_tiny
import msgspec
import pytest
import torch
from compile_tiny import Tiny, one_sequence, random_model
from torch import Tensor

from tokenspeed.compile import pipeline
from tokenspeed.compile.plan import (
    Argument,
    Constant,
    Number,
    PieceCall,
    Program,
    SequenceRow,
    Weight,
    decode,
    encode,
)
from tokenspeed.compile.runner import BindingError, Executable

CPU = torch.device("cpu")


def plan_tiny(*args: object, every_layer: bool = False, **kwargs: bool) -> Program:
    make = functools.partial(Tiny, *args, **kwargs)
    return pipeline.plan_model(make, dtype=torch.float32, device=CPU, every_layer=every_layer)


@pytest.fixture(scope="module")
def uniform() -> Program:
    return plan_tiny("aaaaaaa")


def assert_equal_to_module(program: Program, model: torch.nn.Module, size: int) -> None:
    run = Executable(program, model)
    ids = torch.arange(size) * 7 % compile_tiny.VOCAB
    positions = torch.arange(size)
    with one_sequence():
        x = model.embed(ids)
        hidden = model(x, positions)
        assert torch.equal(run.embed(ids), x)
        assert torch.equal(run.forward(x, positions), hidden)
    assert torch.equal(run.head(hidden), model.head(hidden))
    for rows in ([size - 1], [0, size // 2], list(range(size))):
        with one_sequence():
            chosen = run.forward(x, positions, torch.tensor(rows))
        torch.testing.assert_close(chosen, hidden[rows], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_the_runner_equals_the_module(uniform: Program, size: int) -> None:
    assert_equal_to_module(uniform, random_model(lambda: Tiny("aaaaaaa")), size)


@pytest.mark.parametrize("kinds", ["aaaaaaa", "abbbbbb", "aaabaaabaaab", "abcabcabcab", "a"])
def test_few_layers_give_the_plan_of_all(kinds: str) -> None:
    short, full = plan_tiny(kinds), plan_tiny(kinds, every_layer=True)
    assert short.plan == full.plan
    assert short.pieces.keys() == full.pieces.keys()
    assert_equal_to_module(short, random_model(lambda: Tiny(kinds)), 5)


def test_a_uniform_model_has_three_pieces_between_its_calls(uniform: Program) -> None:
    rows = uniform.plan.forward.rows
    assert len(rows) == 15
    assert len({row.piece for row in rows if isinstance(row, PieceCall)}) == 3
    layers = [row.args[3] for row in rows if isinstance(row, SequenceRow)]
    assert layers == [Constant(i) for i in range(7)]
    assert len(uniform.pieces) == 5


@pytest.mark.parametrize(
    ("broken", "reason"),
    [("leak", "on their place"), ("skip", "uses a result of"), ("far", "on their place")],
)
def test_what_few_layers_cannot_tell_makes_all_be_captured(
    broken: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "tokenspeed"):
        program = plan_tiny("aaaaaaa", **{broken: True})
    (record,) = caplog.records
    assert "every layer is captured" in record.message
    assert reason in record.message
    model = random_model(lambda: Tiny("aaaaaaa", **{broken: True}))
    assert_equal_to_module(program, model, 5)


def test_a_plan_is_json(uniform: Program) -> None:
    text = encode(uniform.plan)
    assert decode(text) == uniform.plan
    with pytest.raises(msgspec.ValidationError):
        decode(text.replace('"weight"', '"surprise"', 1))
    stored = Program(decode(text), uniform.pieces)
    assert_equal_to_module(stored, random_model(lambda: Tiny("aaaaaaa")), 3)


@pytest.mark.parametrize(
    "number", [0.0, -0.0, 1e-6, 1e-5, 0.1, 1e16, 5e-324, 1.7976931348623157e308]
)
def test_numbers_survive_json_bit_for_bit(number: float) -> None:
    read = msgspec.json.decode(msgspec.json.encode(Number(number)), type=Argument)
    assert isinstance(read, Number)
    assert struct.pack("d", read.value) == struct.pack("d", number)


@pytest.mark.parametrize("number", ["1e999", "null", "true", '"1"', "NaN", "-Infinity"])
def test_what_is_no_finite_number_is_refused(number: str) -> None:
    with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
        msgspec.json.decode(f'{{"type":"number","value":{number}}}', type=Argument)
    with pytest.raises(ValueError, match="a plan holds finite numbers"):
        Number(float("nan"))


def test_a_number_is_no_index() -> None:
    """The runner keeps equal arguments once."""
    assert len({Number(0.0), Constant(0)}) == 2


def test_weights_are_known_by_path_shape_and_dtype(uniform: Program) -> None:
    found = {arg for row in uniform.plan.forward.rows for arg in row.args if type(arg) is Weight}
    assert Weight("layers.6.up.weight", (16, 32), "float32") in found
    assert Weight("frequencies", (8,), "float32") in found
    parameters = {name for name, _ in Tiny("aaaaaaa").named_parameters()} - {"tokens.weight"}
    assert {weight.path for weight in found} == parameters | {"frequencies"}


def test_other_weights_are_refused(uniform: Program) -> None:
    model = random_model(lambda: Tiny("aaaaaab"))
    with pytest.raises(BindingError, match=r"layers.6.up.weight is float32 \[24, 32\]"):
        Executable(uniform, model)
    with pytest.raises(BindingError, match=r"is bfloat16 .* planned for float32"):
        Executable(uniform, random_model(lambda: Tiny("aaaaaaa")).to(torch.bfloat16))
    with pytest.raises(BindingError, match=r"needs layers.6.* does not have"):
        Executable(uniform, random_model(lambda: Tiny("aaaaaa")))


def test_results_are_dropped_after_their_last_use(uniform: Program) -> None:
    """While layer i attends, no tensor of layer i - 2 is alive but what flows on."""
    alive: list[int] = []
    seen: list[weakref.ref[Tensor]] = []

    class Watch(compile_tiny.OneSequence):
        def attend(
            self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None
        ) -> Tensor:
            alive.append(sum(ref() is not None for ref in seen))
            seen.extend(weakref.ref(tensor) for tensor in (q, k, v))
            return super().attend(q, k, v, layer, sinks)

    run = Executable(uniform, random_model(lambda: Tiny("aaaaaaa")))
    with compile_tiny.forward_context(Watch()):
        run.forward(run.embed(torch.arange(4)), torch.arange(4))
    assert alive == [0] * 7


def test_phases_are_timed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    phases: list[str] = []
    real = pipeline.span
    monkeypatch.setattr(pipeline, "span", lambda phase: (phases.append(phase), real(phase))[1])
    plan_tiny("a")
    assert phases == ["compile.skeleton"] + ["compile.capture", "compile.split"] * 3
