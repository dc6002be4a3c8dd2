"""Cut a captured graph at its sequence calls: rows of a plan, and the distinct pieces between.

Before:  a  b  attend(0)  c  d  attend(1)  e      After:  piece(a b)  attend  piece(c d)  attend ...
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import fx

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import Captured, UnsupportedGraph
from tokenspeed.compile.piece import build_piece, structure_hash
from tokenspeed.compile.plan import (
    Argument,
    Constant,
    FunctionPlan,
    Input,
    Number,
    PieceCall,
    Row,
    SequenceRow,
    Tokens,
    Value,
    Weight,
)
from tokenspeed.kernels.tables import SEQUENCE_CALLS

_INPUT = re.compile(r"L\['(\w+)'\]")
_WEIGHT = re.compile(r"L\['\w+'\]((?:\._(?:modules|parameters|buffers)\['[^']+'\])+)")
_KEY = re.compile(r"\['([^']+)'\]")


def split(captured: Captured) -> tuple[FunctionPlan, dict[str, fx.GraphModule]]:
    """The plan of a captured function, and its distinct pieces by structure hash."""
    values: dict[fx.Node, Argument] = {
        node: _source(node, captured.input_names)
        for node in captured.graph.find_nodes(op="placeholder")
    }
    rows: list[Row] = []
    pieces: dict[str, fx.GraphModule] = {}
    for nodes in _runs(captured.graph):
        if (op := _sequence_call(nodes[0])) is not None:
            rows.append(SequenceRow(op, _arguments(nodes[0], values)))
            values[nodes[0]] = Value(len(rows) - 1, 0)
            continue
        inside = set(nodes)
        outputs = [node for node in nodes if not inside.issuperset(node.users)]
        piece, inputs = build_piece(nodes, outputs)
        key = structure_hash(piece)
        pieces.setdefault(key, piece)
        rows.append(PieceCall(key, tuple(values[node] for node in inputs), len(outputs)))
        values |= {node: Value(len(rows) - 1, i) for i, node in enumerate(outputs)}
    return FunctionPlan(tuple(rows), values[captured.returned]), pieces


def _sequence_call(node: fx.Node) -> str | None:
    name = torch_api.op_name(node.target)
    return name if name in SEQUENCE_CALLS else None


def _runs(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes in order, cut before and after each sequence call."""
    runs: list[list[fx.Node]] = []
    open_run = False
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        is_cut = _sequence_call(node) is not None
        if is_cut or not open_run:
            runs.append([])
        runs[-1].append(node)
        open_run = not is_cut
    return runs


def _arguments(node: fx.Node, values: dict[fx.Node, Argument]) -> tuple[Argument, ...]:
    """A sequence call's arguments, which `kernels.attend` and its kin pass by position."""
    assert not node.kwargs, f"{node.target} must be called with positional arguments"
    args: list[Argument] = []
    for arg in node.args:
        if isinstance(arg, fx.Node):
            args.append(values[arg])
        elif arg is None or type(arg) is int:
            args.append(Constant(arg))
        elif isinstance(arg, float) and math.isfinite(arg):
            args.append(Number(arg))
        else:
            raise UnsupportedGraph(
                f"{node.target} takes tensors, its layer, finite numbers and None, not {arg!r}"
            )
    return tuple(args)


def _source(placeholder: fx.Node, input_names: Sequence[str]) -> Argument:
    """What a placeholder stands for."""
    value, name = torch_api.example_value(placeholder), torch_api.source_name(placeholder)
    if torch_api.is_symbol(value):
        return Tokens()
    if (found := _INPUT.fullmatch(name)) and found[1] in input_names:
        return Input(input_names.index(found[1]))
    if found := _WEIGHT.fullmatch(name):
        dtype = str(value.dtype).removeprefix("torch.")
        return Weight(".".join(_KEY.findall(found[1])), tuple(value.shape), dtype)
    raise UnsupportedGraph(f"the model reads {name}, which is no input, parameter or buffer")
