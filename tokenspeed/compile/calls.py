"""A piece that is nothing but calls: operators on inputs and earlier results, as plain data.

Where passes have left fused kernels, the library's products and views, and no loop, Inductor has
nothing to do: its code for such a graph is the same calls in the same order. Such a piece is kept
as JSON instead, and a start loads it without Inductor, whose import alone takes seconds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor, fx, nn

from tokenspeed.kernels.blocks import embedding_blocks, linear_blocks
from tokenspeed.kernels.tables import OPS

aten = torch.ops.aten

_PLAIN: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.getitem: operator.getitem,
    aten.sym_size.int: Tensor.size,
    aten.view.default: Tensor.view,
    aten.reshape.default: Tensor.reshape,
    aten.permute.default: Tensor.permute,
    aten.unsqueeze.default: Tensor.unsqueeze,
    aten.select.int: Tensor.select,
    aten.slice.Tensor: aten.slice.Tensor,
    aten.split_with_sizes.default: torch.split_with_sizes,
    aten.mm.default: torch.mm,
    aten.addmm.default: torch.addmm,
    aten.embedding.default: torch.embedding,
}
"""Views, and the library's kernels: what stands in a graph, and the same as Python calls it, past
what a call of an operator by its overload costs the host.
"""

_CHOOSING: tuple[Callable[..., Any], ...] = (linear_blocks, embedding_blocks)
"""They choose a kernel by the token count."""

NAMES = {op: "getitem" if op is operator.getitem else str(op) for op in (*_PLAIN, *OPS, *_CHOOSING)}
"""Every operator of which a piece may be made, each one kernel for Inductor too, or a view."""


def _functions(device: str) -> dict[str, Callable[..., Any]]:
    """What is called for each name."""
    fused = {op: each.launch if device == "cuda" else op for op, each in OPS.items()}
    called = {**_PLAIN, **fused, **{op: op for op in _CHOOSING}}
    return {name: called[op] for op, name in NAMES.items()}


class Ref(msgspec.Struct, frozen=True, tag="ref"):
    """Input number `value`, or, counting on from the inputs, the result of a call."""

    value: int


Plain = bool | int | float | str | None
Operand = Ref | Plain | tuple[Ref | Plain, ...]


class Call(msgspec.Struct, frozen=True):
    """An operator of the table, by name, and its operands by position."""

    op: str
    args: tuple[Operand, ...]


class Calls(msgspec.Struct, frozen=True):
    """All of a piece; `results` are what it returns."""

    num_inputs: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    calls: tuple[Call, ...]
    results: tuple[Ref, ...]


def encode(calls: Calls) -> bytes:
    return msgspec.json.encode(calls)


def decode(data: bytes) -> Calls:
    """What `encode` was given. Raises msgspec.DecodeError for anything else."""
    return msgspec.json.decode(data, type=Calls)


def load(calls: Calls, device: str) -> Callable[..., tuple[Any, ...]]:
    """The function that makes the calls, for tensors on "cpu" or "cuda". Raises ValueError where it
    cannot be one.
    """
    functions = _functions(device)
    graph = fx.Graph()
    values: list[fx.Node] = [graph.placeholder(f"x{at}") for at in range(calls.num_inputs)]

    def node_of(ref: Ref) -> fx.Node:
        if not 0 <= ref.value < len(values):
            raise ValueError(f"value {ref.value} is used before it is there")
        return values[ref.value]

    def operand(arg: Operand) -> Any:
        if isinstance(arg, tuple):
            return [operand(each) for each in arg]
        return node_of(arg) if isinstance(arg, Ref) else arg

    for call in calls.calls:
        if call.op not in functions:
            raise ValueError(f"{call.op!r:.100} is no operator of a piece")
        values.append(graph.call_function(functions[call.op], tuple(map(operand, call.args))))
    graph.output(tuple(map(node_of, calls.results)))
    function: Callable[..., tuple[Any, ...]] = fx.GraphModule(nn.Module(), graph).forward
    return function
