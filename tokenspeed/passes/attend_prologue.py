"""Move RoPE, and the norm of each head before it, into `attend`.

Before: attend(rotate(norm(q)), rotate(norm(k)), v, layer)
After:  attend(q, k, v, layer, sinks, q_weight, k_weight, cos, sin, eps)
Why: a backend that writes the keys and reads the queries anyway does it on the way, and the piece
before the cut has two kernels and four passes over q and k less. Only for backends that declare so.
Silent where q and k are treated differently, where an intermediate is used elsewhere, and where a
head is turned in part.

A graph pass: it walks the graph as Dynamo captured it, calls of Python and torch functions, in
which a cast to float32 stands in float32 models as well.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from tokenspeed.kernels.attend import ATTEND
from tokenspeed.passes.rewrite import Miss, Walk
from tokenspeed.passes.sources import sources_of


@dataclass(frozen=True)
class _Rotated:
    """What came before one operand of `attend`: its source, what was used, the nodes in between."""

    source: fx.Node
    weight: fx.Node | None
    eps: float
    cos: fx.Node
    sin: fx.Node
    inner: frozenset[fx.Node]


def expected(graph: fx.Graph) -> int:
    """Calls of `attend` whose queries were just turned."""
    return sum(_is(_unwrap(node.args[0]), torch.cat) for node in _calls(graph))


def run(graph: fx.Graph) -> int:
    moved = 0
    for node in _calls(graph):
        q, k = (_rotated(arg) for arg in node.args[:2])
        if q and k and _alike(q, k) and _is_private(node, q, k):
            sinks = node.args[4] if len(node.args) > 4 else None
            node.args = (
                *(q.source, k.source, *node.args[2:4], sinks),
                *(q.weight, k.weight, q.cos, q.sin, q.eps),
            )
            moved += 1
    return moved


def nearest(graph: fx.Graph) -> Miss | None:
    """What keeps the first call that has no prologue from having one. Of four steps: the rotation
    of q, that of k, both alike, and nothing between used elsewhere.
    """
    for node in _calls(graph):
        q, k = (_rotated(arg) for arg in node.args[:2])
        for step, (name, turned) in enumerate((("queries", q), ("keys", k))):
            if turned is None:
                last = _unwrap(node.args[step])
                found = getattr(last.target, "__name__", last.target)
                reason = f"the {name} come out of {found}, not of a rotation of two halves"
                return _miss(step, last, reason)
        assert q is not None and k is not None
        if not _alike(q, k):
            return _miss(2, node, _unlike(q, k))
        for each in q.inner | k.inner:
            for user in each.users:
                if user is not node and user not in q.inner | k.inner:
                    return _miss(3, each, f"{each.name} is used by {user.name} as well")
    return None


def _miss(matched: int, node: fx.Node, reason: str) -> Miss:
    return Miss(matched, 4, node.name, sources_of(node), reason)


def _unlike(q: _Rotated, k: _Rotated) -> str:
    """How queries and keys are treated differently."""
    if (q.weight is None) != (k.weight is None):
        normed, plain = ("keys", "queries") if q.weight is None else ("queries", "keys")
        return f"the {normed} are normed, the {plain} not"
    if q.eps != k.eps:
        return f"the norm's epsilon is {q.eps} for queries, {k.eps} for keys"
    return "queries and keys are turned by different angles"


def _calls(graph: fx.Graph) -> Sequence[fx.Node]:
    """Calls of `attend` that have no prologue yet."""
    found = graph.find_nodes(op="call_function", target=ATTEND)
    return [node for node in found if len(node.args) <= 5]


def _alike(q: _Rotated, k: _Rotated) -> bool:
    same_norm = (q.weight is None) == (k.weight is None) and q.eps == k.eps
    return same_norm and q.cos is k.cos and q.sin is k.sin


def _is_private(node: fx.Node, q: _Rotated, k: _Rotated) -> bool:
    """Is nothing between the sources and `attend` used elsewhere?"""
    inner = q.inner | k.inner
    return all(user is node or user in inner for each in inner for user in each.users)


def _rotated(node: Any) -> _Rotated | None:
    """cat((a * cos - b * sin, b * cos + a * sin), -1).to(dtype), a and b the halves of x."""
    cat = _unwrap(node)
    if not _is(cat, torch.cat) or len(cat.args[0]) != 2:
        return None
    difference, total = cat.args[0]
    if not _is(difference, operator.sub) or not _is(total, operator.add):
        return None
    products = [*difference.args, *total.args]
    if not all(_is(product, operator.mul) for product in products):
        return None
    (a, cos), (b, sin), (b_again, cos_again), (a_again, sin_again) = (p.args for p in products)
    if (a, b, cos, sin) != (a_again, b_again, cos_again, sin_again):
        return None
    x = _halved(a, b)
    if x is None or not _are_angles(cos, sin, x) or _value(x).dtype != _value(node).dtype:
        return None
    inner = {node, cat, difference, total, *products, a, b}
    return _with_norm(x, cos, sin, inner)


def _with_norm(x: Any, cos: fx.Node, sin: fx.Node, inner: set[fx.Node]) -> _Rotated:
    """x = (wide * rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(dtype) * weight, if so."""
    plain = _Rotated(x, None, 0.0, cos, sin, frozenset(inner))
    if not _is(x, operator.mul) or not _is(x.args[0], "to"):
        return plain
    cast, weight = x.args
    scaled = cast.args[0]
    if not _is(scaled, operator.mul) or not _is(scaled.args[1], torch.rsqrt):
        return plain
    wide, rsqrt = scaled.args
    biased = rsqrt.args[0]
    if not _is(biased, operator.add) or not _is(biased.args[0], "mean"):
        return plain
    mean, eps = biased.args
    square = mean.args[0]
    is_mean_of_rows = mean.args[1:] == (-1,) and mean.kwargs == {"keepdim": True}
    if not is_mean_of_rows or not _is(square, "square") or square.args != (wide,):
        return plain
    if not _is(wide, "float") or not isinstance(eps, float) or not isinstance(weight, fx.Node):
        return plain
    source = wide.args[0]
    if not _value(weight).dtype == _value(cast).dtype == _value(source).dtype:
        return plain
    inner |= {x, cast, scaled, wide, rsqrt, biased, mean, square}
    return _Rotated(source, weight, eps, cos, sin, frozenset(inner))


def _halved(a: Any, b: Any) -> fx.Node | None:
    """x where a and b are x[..., :n / 2] and x[..., n / 2 : n] of x [.., n]."""
    if not _is(a, operator.getitem) or not _is(b, operator.getitem) or a.args[0] is not b.args[0]:
        return None
    x: fx.Node = a.args[0]
    size = _value(x).shape[-1]
    halves = ((..., slice(None, size // 2, None)), (..., slice(size // 2, size, None)))
    return x if (a.args[1], b.args[1]) == halves else None


def _are_angles(cos: Any, sin: Any, x: fx.Node) -> bool:
    """float32 [T, 1, n / 2], shared by a token's heads."""
    for each in (cos, sin):
        if not isinstance(each, fx.Node) or _value(each).dtype != torch.float32:
            return False
        if _value(each).shape[1:] != (1, _value(x).shape[-1] // 2):
            return False
    return True


def _unwrap(node: Any) -> Any:
    """The node behind `.to(dtype)`."""
    return node.args[0] if _is(node, "to") else node


def _is(node: Any, target: Any) -> bool:
    """Is it a call of this function, or of the method of this name?"""
    return isinstance(node, fx.Node) and node.op.startswith("call_") and node.target == target


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["example_value"]
    return value


PASS = Walk(name="attend_prologue", run=run, expected=expected, nearest=nearest)
