"""From one function of a model to one clean graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx

from tokenspeed.compile import torch_api

_EXAMPLE_TOKENS = 8
"""Any size serves: the graph may not depend on it. (0 and 1 are special to the tracer.)"""


class UnsupportedGraph(ValueError):
    """The model does something that a plan cannot express."""


@dataclass(frozen=True)
class Captured:
    """A function's graph for any token count, its parameters' names, and what it returns."""

    graph: fx.Graph
    input_names: tuple[str, ...]
    returned: fx.Node

    def example(self) -> Tensor:
        """A real tensor that stands for the function's result [T, N], to trace another with."""
        fake = torch_api.example_value(self.returned)
        return torch.zeros(_EXAMPLE_TOKENS, *fake.shape[1:], dtype=fake.dtype, device=fake.device)


def example_ids(device: torch.device) -> Tensor:
    """Token ids or positions to trace with."""
    return torch.zeros(_EXAMPLE_TOKENS, dtype=torch.int64, device=device)


def capture(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Captured:
    """Trace a method of a module built by `fake_module`. Raises UnsupportedGraph where it does not
    return one computed tensor, or where the graph was specialised to the example's size.
    """
    name = function.__name__
    graph = torch_api.capture(function, inputs).graph
    if not any(_is_symbol(node) for node in graph.find_nodes(op="placeholder")):
        raise UnsupportedGraph(f"the graph of {name} holds for {_EXAMPLE_TOKENS} tokens only")
    torch_api.drop_assertions(graph)
    returned = cast(tuple[object, ...], graph.output_node().args[0])
    if len(returned) != 1 or not isinstance(returned[0], fx.Node):
        raise UnsupportedGraph(f"{name} must return one tensor")
    return Captured(graph, tuple(inspect.signature(function).parameters), returned[0])


def _is_symbol(placeholder: fx.Node) -> bool:
    return torch_api.is_symbol(torch_api.example_value(placeholder))
