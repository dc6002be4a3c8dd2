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
from torch import fx, nn

from tokenspeed.kernels.blocks import embedding_blocks, linear_blocks
from tokenspeed.kernels.linear import linear
from tokenspeed.kernels.tables import OPS

aten = torch.ops.aten

_VIEWS: tuple[Callable[..., Any], ...] = (
    *(aten.view.default, aten.reshape.default, aten.permute.default, aten.unsqueeze.default),
    *(aten.split_with_sizes.default, aten.slice.Tensor, aten.select.int, aten.sym_size.int),
    operator.getitem,
)

_KERNELS: tuple[Callable[..., Any], ...] = (
    *(aten.mm.default, aten.addmm.default, aten.embedding.default),
    *(*OPS, linear, linear_blocks, embedding_blocks),
)
"""Each is one kernel for Inductor too, or chosen by the token count."""

NAMES = {op: "getitem" if op is operator.getitem else str(op) for op in (*_VIEWS, *_KERNELS)}
_BY_NAME = {name: op for op, name in NAMES.items()}


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


def load(data: bytes) -> Callable[..., tuple[Any, ...]]:
    """The function that `encode` was given the calls of. Raises ValueError or msgspec.DecodeError
    for anything else.
    """
    calls = msgspec.json.decode(data, type=Calls)
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
        if call.op not in _BY_NAME:
            raise ValueError(f"{call.op!r:.100} is no operator of a piece")
        values.append(graph.call_function(_BY_NAME[call.op], tuple(map(operand, call.args))))
    graph.output(tuple(map(node_of, calls.results)))
    function: Callable[..., tuple[Any, ...]] = fx.GraphModule(nn.Module(), graph).forward
    return function
