"""Pictures of graphs, for the receipt: nodes, launches and near misses as records of text."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tokenspeed.compile.graph_receipt import Kernel, Op, PieceMiss
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.sources import origins_of, place_of, sources_of
from tokenspeed.passes.traffic import moves, value_of

_SYMBOL = re.compile(r"\b[us]\d+\b")
_MAX_TEXT = 200


def ops_of(graph: fx.Graph) -> tuple[Op, ...]:
    return tuple(_op(node) for node in graph.nodes)


def launches_of(graph: fx.Graph) -> list[tuple[str, Sequence[str], Sequence[str]]]:
    """Those of a graph whose every call that is no view launches its own kernel."""
    return [(op_name(node), (node.name,), ()) for node in graph.nodes if moves(node)]


def kernels_of(
    launches: Iterable[tuple[str, Sequence[str], Sequence[str]]], after: fx.Graph
) -> tuple[Kernel, ...]:
    """The kernels of launches: a name, the nodes that went into it, stack traces of nodes that came
    later than the passes.
    """
    known = {node.name: node for node in after.nodes}
    launches = list(launches)
    # A fused loop also names the calls whose results it reads: those are launches of their own.
    alone = {nodes[0] for _, nodes, _ in launches if len(nodes) == 1}
    kernels = []
    for name, nodes, traces in launches:
        own = nodes if len(nodes) == 1 else [each for each in nodes if each not in alone]
        ops = [known[each] for each in own if each in known]
        places = [place for node in ops for place in sources_of(node)]
        if any(each not in known for each in own):
            places += filter(None, map(place_of, traces))
        names = tuple(node.name for node in after.nodes if node in ops)
        kernels.append(Kernel(name.rpartition(":")[0] or name, names, tuple(sorted(set(places)))))
    return tuple(kernels)


def misses_of(ran: Sequence[tuple[str | None, str, PassManager]]) -> list[PieceMiss]:
    """What managers that ran over the pieces (by hash, None: a function; and token range) nearly
    found: each pass that matched less often than expected, and, once, each that matched nothing at
    all. (One that found its idiom in another piece is not missed in this one.)
    """
    totals: Counter[str] = Counter()
    for _, _, manager in ran:
        totals.update(manager.counts)
    short: list[PieceMiss] = []
    silent: dict[str, PieceMiss] = {}
    for piece, token_range, manager in ran:
        for report in manager.reports:
            if not report.is_short and totals[report.name]:
                continue
            miss = manager.nearest(report.name)
            if miss is None:
                continue
            found = PieceMiss(report.name, piece, token_range, miss)
            if report.is_short:
                short.append(found)
            elif report.name not in silent or silent[report.name].miss.share < miss.share:
                silent[report.name] = found
    return [*short, *silent.values()]


def op_name(node: fx.Node) -> str:
    """`aten.mul.Tensor`, `tokenspeed.rope`, `getitem`."""
    if node.op != "call_function":
        return "input" if node.op == "placeholder" else node.op
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removesuffix(".default")


def describe(value: Any) -> str:
    """`bfloat16 [T, 1024]`; of several, all of them."""
    if isinstance(value, Tensor):
        sizes = ", ".join(_SYMBOL.sub("T", str(size)) for size in value.shape)
        return f"{str(value.dtype).removeprefix('torch.')} [{sizes}]"
    if isinstance(value, (tuple, list)):
        return " · ".join(map(describe, value))
    return "T" if isinstance(value, torch.SymInt) else ""


def _op(node: fx.Node) -> Op:
    plain = [arg for arg in (*node.args, *node.kwargs.values()) if not _holds_nodes(arg)]
    return Op(
        name=node.name,
        op=op_name(node),
        inputs=tuple(arg.name for arg in node.all_input_nodes),
        args=tuple(str(arg)[:_MAX_TEXT] for arg in plain),
        value=describe(value_of(node)),
        sources=sources_of(node),
        moves=moves(node),
        replaced=tuple(name for name in origins_of(node) if name != node.name),
    )


def _holds_nodes(arg: Any) -> bool:
    if isinstance(arg, (tuple, list)):
        return any(map(_holds_nodes, arg))
    return isinstance(arg, fx.Node)
