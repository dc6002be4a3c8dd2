"""Remove calls that change nothing.

Before: reshape to the shape it has, slice of everything, cast to its own dtype, times 1.0
After: their operand
Why: they stand between the parts of an idiom, and no pattern shows them. Silent where the graph
would come to return an input, or one tensor twice, or a tensor in the place of its view.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tokenspeed.passes.rewrite import Walk
from tokenspeed.passes.shapes import aten
from tokenspeed.passes.torch_api import is_same

_SAME_WHERE_EQUAL = {
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.alias.default,
    torch.ops.prims.convert_element_type.default,
}
"""These give their operand back where the result has its shape, strides and dtype. (A permutation
of equal sizes shows in the strides, a slice of all in the shape.)
"""


def run(graph: fx.Graph) -> int:
    removed = 0
    for node in list(graph.nodes):
        if _is_noop(node) and (graph.output_node() not in node.users or _may_be_returned(node)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            removed += 1
    return removed


def _is_noop(node: fx.Node) -> bool:
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, Tensor) or not isinstance(after, Tensor):
        return False
    return (
        (node.target in _SAME_WHERE_EQUAL or _is_times_one(node))
        and before.dtype == after.dtype
        and _equal(before.shape, after.shape)
        and _equal(before.stride(), after.stride())
    )


def _is_times_one(node: fx.Node) -> bool:
    return node.target == aten.mul.Tensor and type(node.args[1]) is float and node.args[1] == 1.0


def _may_be_returned(node: fx.Node) -> bool:
    """May the graph return this node's operand in its place?"""
    operand = node.args[0]
    assert isinstance(operand, fx.Node)
    is_result = node.graph.output_node() in operand.users
    return _is_times_one(node) and operand.op == "call_function" and not is_result


def _equal(one: Any, other: Any) -> bool:
    return len(one) == len(other) and all(map(is_same, one, other))


PASS = Walk(name="noop", run=run)
