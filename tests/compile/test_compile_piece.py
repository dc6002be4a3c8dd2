"""A piece's hash: equal for equal computations, in every process, and for nothing else."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections.abc import Callable

import compile_tiny
import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tokenspeed.compile.capture import UnsupportedGraph, capture
from tokenspeed.compile.piece import build_piece, structure_hash
from tokenspeed.compile.pipeline import plan_model
from tokenspeed.compile.split import split


class One(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def hash_of(
    function: Callable[[Tensor], Tensor], width: int = 4, dtype: torch.dtype = torch.float32
) -> str:
    (key,) = split(capture(One(function).forward, (torch.zeros(8, width, dtype=dtype),)))[1]
    return key


def test_names_do_not_enter() -> None:
    def first(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x).mul(2.0)[:, 1:3]

    def second(x: Tensor) -> Tensor:
        something_else = torch.nn.functional.silu(x)
        another_name = something_else.mul(2.0)
        return another_name[:, 1:3]

    assert hash_of(first) == hash_of(second)


def test_what_is_computed_enters() -> None:
    keys = [
        hash_of(lambda x: x * 2.0),
        hash_of(lambda x: x * 3.0),
        hash_of(lambda x: x + 2.0),
        hash_of(lambda x: x * 2.0, width=5),
        hash_of(lambda x: x * 2.0, dtype=torch.float64),
        hash_of(lambda x: x[:, 1:]),
        hash_of(lambda x: x[:, :1]),
        hash_of(lambda x: x.to(torch.float64)),
        hash_of(lambda x: x.to(torch.float16)),
        hash_of(lambda x: (x * 2.0).sin() + x),
        hash_of(lambda x: (x * 2.0).sin() + x * 2.0),
    ]
    assert len(set(keys)) == len(keys)


def test_inputs_come_in_order_of_use_and_results_as_a_tuple() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    for node in (x, y):
        node.meta["example_value"] = torch.zeros(2)
    first = graph.call_function(torch.sub, (y, x))
    second = graph.call_method("mul", (first, 2.0))
    piece, inputs = build_piece([first, second], [second, first])
    assert inputs == [y, x]
    product, difference = piece(torch.tensor(5.0), torch.tensor(3.0))
    assert (float(difference), float(product)) == (2.0, 4.0)


def test_a_constant_that_has_no_stable_text_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["example_value"] = torch.zeros(2)
    node = graph.call_function(torch.add, (x, 1j))
    with pytest.raises(UnsupportedGraph, match="type complex"):
        structure_hash(build_piece([node], [node])[0])


def test_a_graph_inside_the_graph_is_refused() -> None:
    node = fx.Graph().get_attr("body")
    with pytest.raises(UnsupportedGraph, match="not get_attr of 'body'"):
        build_piece([node], [node])


def test_sizes_are_known_by_order_not_by_name() -> None:
    def key(*sizes: object) -> str:
        graph = fx.Graph()
        nodes = [graph.placeholder(f"size{i}") for i in range(2)]
        for node, size in zip(nodes, sizes, strict=True):
            node.meta["example_value"] = size
        total = graph.call_function(operator.add, tuple(nodes))
        return structure_hash(build_piece([total], [total])[0])

    environment = ShapeEnv()
    a, b, c = (environment.create_unbacked_symint() for _ in range(3))
    assert key(a, b) == key(b, c) == key(c, a)
    assert key(a, a) != key(a, b)


def test_hashes_are_equal_in_another_process() -> None:
    code = (
        "import compile_tiny, torch; from tokenspeed.compile.pipeline import plan_model;"
        "program = plan_model(lambda: compile_tiny.Tiny('aaba'), dtype=torch.float32,"
        " device=torch.device('cpu')); print(sorted(program.pieces))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=compile_tiny.__file__.rpartition("/")[0],
    )
    here = plan_model(
        lambda: compile_tiny.Tiny("aaba"), dtype=torch.float32, device=torch.device("cpu")
    )
    assert done.stdout.strip() == str(sorted(here.pieces)), done.stderr
