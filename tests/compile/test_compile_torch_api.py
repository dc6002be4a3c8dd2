"""Every symbol of `torch_api` does what the compiler needs, on the torch that is installed."""

from __future__ import annotations

import compile_tiny
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor

from tokenspeed.compile import torch_api

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return torch_api.fake_module(lambda: compile_tiny.Tiny("a"), torch.bfloat16, CPU)


@pytest.fixture(scope="module")
def graph(model: torch.nn.Module) -> torch.fx.Graph:
    x = torch.zeros(8, compile_tiny.HIDDEN, dtype=torch.bfloat16)
    return torch_api.capture(model.forward, (x, torch.zeros(8, dtype=torch.int64))).graph


def test_fake_module_has_dtype_and_device_but_no_storage(model: torch.nn.Module) -> None:
    weight = model.tokens.weight
    assert (weight.dtype, weight.device, weight.requires_grad) == (torch.bfloat16, CPU, False)
    assert isinstance(weight, FakeTensor)
    assert torch.get_default_dtype() == torch.float32


def test_default_dtype_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), torch_api.default_dtype(torch.float16):
        assert torch.empty(1).dtype == torch.float16
        raise ZeroDivisionError
    assert torch.get_default_dtype() == torch.float32


def test_capture_keeps_the_token_count_symbolic(graph: torch.fx.Graph) -> None:
    values = {n: torch_api.example_value(n) for n in graph.find_nodes(op="placeholder")}
    (size,) = [value for value in values.values() if torch_api.is_symbol(value)]
    by_name = {torch_api.source_name(node): value for node, value in values.items()}
    assert by_name["L['x']"].shape[0] == by_name["L['positions']"].shape[0] == size
    assert (
        "L['self']._modules['layers']._modules['0']._modules['up']._parameters['bias']" in by_name
    )
    assert "L['self']._buffers['frequencies']" in by_name


def test_drop_assertions_leaves_only_the_model(graph: torch.fx.Graph) -> None:
    def checks() -> list[str]:
        return [str(n.target) for n in graph.nodes if "assert" in str(n.target) or n.name == "ge"]

    assert checks()
    torch_api.drop_assertions(graph)
    assert not checks()
    graph.lint()


def test_both_ways_to_capture_give_the_same_graph(model: torch.nn.Module) -> None:
    def listing(capture: object) -> list[tuple[str, str]]:
        graph = capture(model.head, (rows,)).graph  # type: ignore[operator]
        torch_api.drop_assertions(graph)
        return [(node.op, str(node.target)) for node in graph.nodes if node.op != "placeholder"]

    rows = torch.zeros(8, compile_tiny.HIDDEN, dtype=torch.bfloat16)
    first = listing(torch_api.capture)
    assert listing(torch_api.capture_with_backend) == first != []


@pytest.mark.parametrize(
    ("target", "name"),
    [
        (torch.ops.aten.add.Tensor, "aten::add.Tensor"),
        (torch.ops.tokenspeed.attend, "tokenspeed::attend"),
        (torch.ops.tokenspeed.attend.default, "tokenspeed::attend"),
        (torch.cat, None),
        ("view", None),
    ],
)
def test_op_name(target: object, name: str | None) -> None:
    assert torch_api.op_name(target) == name


class Scaled(torch.nn.Module):
    def __init__(self, scale: float, shift: int) -> None:
        super().__init__()
        self.scale, self.shift = scale, shift

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        return rows * self.scale + self.shift


@pytest.mark.parametrize("capture", [torch_api.capture, torch_api.capture_with_backend])
def test_numbers_of_a_model_stay_constants(capture: object) -> None:
    for scale, shift in ((0.5, 2), (0.25, 3), (0.125, 4)):
        graph = capture(Scaled(scale, shift).head, (torch.zeros(8, 4),)).graph  # type: ignore[operator]
        names = {torch_api.source_name(node) for node in graph.find_nodes(op="placeholder")}
        assert not [name for name in names if "self" in name], names
        assert {scale, shift} <= {
            arg for node in graph.nodes for arg in node.args if not isinstance(arg, tuple)
        }
