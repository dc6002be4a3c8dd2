"""A piece: a run of graph nodes as a graph of its own, and the hash by which equal pieces are one.

The hash says what is computed and on which shapes, and nothing else: no node name, no weight path,
no position in the model, no memory address. So it is equal for equal layers and in every process.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

import torch
from torch import Tensor, fx, nn

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import UnsupportedGraph

_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.layout, torch.memory_format)


def build_piece(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node]
) -> tuple[fx.GraphModule, list[fx.Node]]:
    """Copy `nodes` into a graph that returns the tuple of `outputs`. Also returns the outer nodes
    that become its inputs, in order of first use.
    """
    graph = fx.Graph()
    inner: dict[fx.Node, fx.Node] = {}
    inputs: list[fx.Node] = []
    inside = set(nodes)
    for outer in (used for node in nodes for used in node.all_input_nodes):
        if outer not in inside and outer not in inner:
            inputs.append(outer)
            inner[outer] = graph.placeholder(outer.name)
            inner[outer].meta.update(outer.meta)
    for node in nodes:
        if node.op not in ("call_function", "call_method"):
            raise UnsupportedGraph(
                f"a piece holds function and method calls, not {node.op} of {node.target!r}"
            )
        inner[node] = graph.node_copy(node, lambda outer: inner[outer])
    graph.output(tuple(inner[node] for node in outputs))
    return fx.GraphModule(nn.Module(), graph), inputs


def structure_hash(piece: fx.GraphModule) -> str:
    """16 hex digits over the piece's operations, constants, wiring, and the shapes, strides, dtypes
    and device kinds of its inputs.
    """
    number = {node: i for i, node in enumerate(piece.graph.nodes)}
    symbols: dict[str, str] = {}
    lines = []
    for node in piece.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"input {_describe(torch_api.example_value(node), symbols)}")
        else:
            target = "" if node.op == "output" else _target_name(node.target)
            lines.append(f"{node.op} {target} {_encode([node.args, node.kwargs], number)}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _describe(value: object, symbols: dict[str, str]) -> str:
    """A value's kind; symbolic sizes are renumbered by first appearance."""

    def canonical(size: object) -> str:
        rename = lambda found: symbols.setdefault(found[0], f"t{len(symbols)}")  # noqa: E731
        return re.sub(r"\b[a-z]+\d+\b", rename, str(size))

    if isinstance(value, Tensor):
        sizes, strides = map(canonical, value.shape), map(canonical, value.stride())
        return f"{value.dtype} {value.device.type} {','.join(sizes)} {','.join(strides)}"
    return f"{type(value).__name__} {canonical(value)}"


def _target_name(target: object) -> str:
    """A function's import path: its `str` may hold an address."""
    name = target if isinstance(target, str) else torch_api.op_name(target)
    return name or f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', '')}"


def _encode(arg: object, number: dict[fx.Node, int]) -> str:
    """An argument as text that is the same in every process."""
    if isinstance(arg, fx.Node):
        return f"%{number[arg]}"
    if isinstance(arg, (tuple, list)):
        return f"[{','.join(_encode(item, number) for item in arg)}]"
    if isinstance(arg, dict):
        return f"{{{','.join(f'{key}={_encode(arg[key], number)}' for key in sorted(arg))}}}"
    if isinstance(arg, slice):
        return f"slice{_encode((arg.start, arg.stop, arg.step), number)}"
    if isinstance(arg, torch.device):
        return arg.type
    if arg is Ellipsis or isinstance(arg, _PLAIN):
        return repr(arg)
    raise UnsupportedGraph(f"a piece cannot hold a constant of type {type(arg).__name__}")
