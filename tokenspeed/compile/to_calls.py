"""Is a graph nothing but calls, and of which operators? What `calls.py` keeps and loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from tokenspeed.compile.calls import NAMES, Call, Calls, Ref
from tokenspeed.passes.torch_api import is_same, storage_of


class _Other(Exception):
    """Something that is no call of the table."""


def calls_of(graph: fx.Graph, inputs: Sequence[Any]) -> Calls | None:
    """The calls that a graph is made of, or None if there is more to it. `graph` is functional
    aten with its fake values, and came of a function of `inputs`, fake as well.
    """
    placeholders = list(graph.find_nodes(op="placeholder"))
    if not _are_alike([node.meta.get("val") for node in placeholders], inputs):
        return None
    known: dict[fx.Node, Ref] = {node: Ref(number) for number, node in enumerate(placeholders)}
    found = []
    try:
        for node in graph.nodes:
            if node.op == "call_function":
                found.append(_call(node, known))
                known[node] = Ref(len(known))
            elif node.op not in ("placeholder", "output"):
                return None
        returned: Any = graph.output_node().args[0]
        results = tuple(known[node] for node in returned)
    except (_Other, KeyError):
        return None
    if _returns_memory_of(placeholders, returned):
        return None
    return Calls(len(placeholders), tuple(found), results)


def _call(node: fx.Node, known: dict[fx.Node, Ref]) -> Call:
    if node.target not in NAMES or node.kwargs:
        raise _Other
    return Call(NAMES[node.target], tuple(_operand(arg, known) for arg in node.args))


def _operand(arg: Any, known: dict[fx.Node, Ref]) -> Any:
    if isinstance(arg, fx.Node):
        return known[arg]
    if isinstance(arg, (list, tuple)):
        if any(isinstance(each, (list, tuple)) for each in arg):
            raise _Other
        return tuple(_operand(each, known) for each in arg)
    is_number = isinstance(arg, float) and math.isfinite(arg)
    if arg is None or is_number or isinstance(arg, (bool, int, str)):
        return arg
    raise _Other


def _are_alike(found: Sequence[Any], inputs: Sequence[Any]) -> bool:
    """Does a graph take what its function does, in that order?"""
    if len(found) != len(inputs):
        return False
    for one, other in zip(found, inputs, strict=True):
        if isinstance(one, Tensor) != isinstance(other, Tensor):
            return False
        if isinstance(one, Tensor) and not _is_alike(one, other):
            return False
    return True


def _is_alike(one: Tensor, other: Tensor) -> bool:
    sizes = zip((*one.shape, *one.stride()), (*other.shape, *other.stride()), strict=False)
    is_dtype = one.dtype == other.dtype and one.dim() == other.dim()
    return is_dtype and all(is_same(*each) for each in sizes)


def _returns_memory_of(placeholders: Sequence[fx.Node], results: Sequence[fx.Node]) -> bool:
    """Is a result an input, or a view of one? Who traced the graph makes such results anew."""
    given, returned = [node.meta["val"] for node in placeholders], [n.meta["val"] for n in results]
    if not all(isinstance(value, Tensor) for value in returned):
        return True
    storages = {storage_of(value) for value in given if isinstance(value, Tensor)}
    return any(storage_of(value) in storages for value in returned)
