"""Bytes of memory that a graph reads and writes at one token, were every op a kernel of its own.

Not what a compiled graph moves: the compiler fuses as well. But the difference that a pass makes is
what it takes off the compiler's hands, whatever that would have made of it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from tokenspeed.passes.torch_api import at_one, returns_views, storage_of

_VIEWS = {operator.getitem, torch.ops.aten.reshape.default, torch.ops.aten.sym_size.int}
"""These move nothing; of other operators the schema says so. (Reshapes are of what is dense.)"""


def traffic(graph: fx.Graph) -> int:
    """Of a graph whose nodes know their fake values: functional aten, or as Dynamo captured it."""
    return sum(_moved(node) for node in graph.nodes if moves(node))


def moves(node: fx.Node) -> bool:
    """Does the call read and write memory, and is no view of what is there?"""
    if not node.op.startswith("call_") or node.target in _VIEWS:
        return False
    is_view = returns_views(node.target)
    return not (_shares(node) if is_view is None else is_view)


def value_of(node: fx.Node) -> Any:
    """The fake value of a node, before or after it became aten."""
    return node.meta.get("val", node.meta.get("example_value"))


def _shares(node: fx.Node) -> bool:
    """Is the result a part of an operand's memory?"""
    operands = {storage_of(x) for arg in node.all_input_nodes for x in _tensors(value_of(arg))}
    return all(storage_of(x) in operands for x in _tensors(value_of(node)))


def _moved(node: fx.Node) -> int:
    values = [*map(value_of, node.all_input_nodes), value_of(node)]
    return sum(_bytes(tensor) for value in values for tensor in _tensors(value))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)


def _bytes(tensor: Tensor) -> int:
    """A size that is a number, or one for each token."""
    return tensor.element_size() * math.prod(map(at_one, tensor.shape))
