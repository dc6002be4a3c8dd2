"""Give matrix products with a weight to `linear`, which picks its kernel when T is known.

Before: mm(x, permute(w, [1, 0]))    addmm(bias, x, permute(w, [1, 0]))
After:  linear(x, w)                 linear(x, w, bias)
Why: on a CPU no single kernel is good for one token and for a thousand. Only for weights that are
inputs of the graph, [rows, size] and contiguous as checkpoints store them, and only in float32,
which the kernels behind `linear` are for: other dtypes lose nothing by staying where Inductor may
fuse around them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tokenspeed.kernels.linear import linear
from tokenspeed.passes.rewrite import Miss, Walk
from tokenspeed.passes.shapes import aten, calls
from tokenspeed.passes.sources import sources_of

_TRANSPOSES = (aten.permute.default, aten.t.default)


def expected(graph: fx.Graph) -> int:
    """Products of a transposed input in float32."""
    products = (*_named(graph, aten.mm.default), *_named(graph, aten.addmm.default))
    return sum(_weight(node.args[-1]) is not None for node in products)


def run(graph: fx.Graph) -> int:
    found = list(_products(graph))
    for node, args in found:
        with graph.inserting_before(node):
            new = graph.call_function(linear, args)
        new.meta.update(node.meta)
        node.replace_all_uses_with(new)
        graph.erase_node(node)
    return len(found)


def nearest(graph: fx.Graph) -> Miss | None:
    """What keeps the first product that is left from being taken. Of two steps: the weight, and
    what it is multiplied with.
    """
    for node in (*_named(graph, aten.mm.default), *_named(graph, aten.addmm.default)):
        weight, x = node.args[-1], node.args[-2]
        if _weight(weight) is None:
            dtype = str(_value(weight).dtype).removeprefix("torch.")
            reason = f"its weight, {dtype}, is no float32 matrix [rows, size] the graph was given"
            return Miss(0, 2, node.name, sources_of(node), reason)
        if not _value(x).is_contiguous():
            reason = f"x is not contiguous: strides {_value(x).stride()}"
        else:
            reason = "what is added is no vector of the product's size, or it is scaled"
        return Miss(1, 2, node.name, sources_of(node), reason)
    return None


def _named(graph: fx.Graph, target: Any) -> Sequence[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=target))


def _products(graph: fx.Graph) -> Iterator[tuple[fx.Node, tuple[Any, ...]]]:
    """Products that `linear` computes as well, with its arguments."""
    for node in _named(graph, aten.mm.default):
        x, transposed = node.args
        if (w := _weight(transposed)) is not None and _value(x).is_contiguous():
            yield node, (x, w)
    for node in _named(graph, aten.addmm.default):
        bias, x, transposed = node.args
        w = _weight(transposed)
        # A residual is added in the shape [T, N]; scaled sums (beta, alpha) stand in kwargs.
        if w is not None and not node.kwargs and _value(bias).shape == _value(w).shape[:1]:
            if _value(x).is_contiguous() and _value(bias).is_contiguous():
                yield node, (x, w, bias)


def _weight(node: Any) -> fx.Node | None:
    """w of permute(w, [1, 0]), if it is a plain float32 matrix that the graph was given."""
    if not calls(node, *_TRANSPOSES) or node.args[1:] not in (([1, 0],), ()):
        return None
    w = node.args[0]
    if not isinstance(w, fx.Node) or w.op != "placeholder":
        return None
    value = _value(w)
    is_plain = value.dim() == 2 and value.is_contiguous() and value.dtype == torch.float32
    return w if is_plain and all(isinstance(size, int) for size in value.shape) else None


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


PASS = Walk(name="weight_layout", run=run, expected=expected, nearest=nearest)
