"""The nearest miss: how far a pattern fits a graph where it does not match, and what ends it.

From every pair of a pattern's op and an op of the graph that could be it, the fit is grown along
operands and users; the largest one is told about. The pattern is the trace of a pass's reference,
the graph what the pass saw, both functional aten.

    pattern   split -> convert -> neg -> exp -> ...       fit      split -> convert
    graph     split -> convert -> mul -> erf -> ...       reason   wants aten.neg, finds aten.mul
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tokenspeed.passes.rewrite import Miss
from tokenspeed.passes.sources import sources_of

aten = torch.ops.aten
_SIZED = {
    aten.view.default,
    aten.reshape.default,
    aten.expand.default,
    aten.slice.Tensor,
    aten.split_with_sizes.default,
    aten.split.Tensor,
}
"""Their numbers are sizes: of the example operands in a pattern, of the model's in a graph."""

_ALIKE = 4
"""A fit of fewer ops, or of less than a third, says nothing; of a short pattern, all but one."""

Binding = Mapping[str, fx.Node]
"""The graph's node for each of the pattern's operands, by name."""


def nearest(pattern: fx.Graph, graph: fx.Graph) -> tuple[Miss | None, Binding]:
    """Where the largest fit ends; None where nothing is alike, or where all of the pattern is there
    (as a search can see that knows no sizes): its operands tell more, then.
    """
    best: _Fit | None = None
    calls = [node for node in graph.nodes if node.op == "call_function"]
    for own in _ops(pattern):
        for there in calls:
            if best is not None and best.fitted.get(own) is there:
                continue  # it would grow into the same
            if _is_alike(own, there):
                fit = _Fit(own, there)
                if best is None or len(fit.fitted) > len(best.fitted):
                    best = fit
    total = len(_ops(pattern))
    if best is None or len(best.fitted) < max(2, min(_ALIKE, total - 1), total / 3):
        return None, {}
    if len(best.fitted) == total and (found := best.leak() or best.conflict()) is None:
        return None, best.bound
    if len(best.fitted) < total:
        found = best.end(_ops(pattern))
    assert found is not None
    node, reason = found
    return Miss(len(best.fitted), total, node.name, sources_of(node), reason), {}


def nearest_of(
    patterns: Sequence[fx.Graph],
    graph: fx.Graph,
    refuse: Callable[[fx.Graph, Binding], Miss | None],
) -> Miss | None:
    """The nearest of several patterns, that with the largest share. `refuse` says why a whole fit
    was no match.
    """
    misses = []
    for pattern in patterns:
        miss, bound = nearest(pattern, graph)
        if miss is None and bound:
            miss = refuse(pattern, bound)
        if miss is not None:
            misses.append(miss)
    return max(misses, key=lambda miss: (miss.share, miss.total), default=None)


def first_difference(pattern: fx.Graph, graph: fx.Graph) -> Miss | None:
    """What differs in the largest fit of a pattern that was traced with the graph's own operands,
    so that sizes are compared as well.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    fits = [_Fit(own, there) for own in _ops(pattern) for there in calls if _is_alike(own, there)]
    best = max(fits, key=lambda fit: len(fit.fitted), default=None)
    for own, there in best.fitted.items() if best else ():
        if (ours := _numbers(own)) != (theirs := _numbers(there)):
            reason = f"{_name(own)}: the pattern has {ours}, the graph {theirs}"
            total = len(_ops(pattern))
            return Miss(total, total, there.name, sources_of(there), reason)
    return None


class _Fit:
    """A part of a pattern on a part of a graph, grown from one pair of ops as far as it goes."""

    def __init__(self, own: fx.Node, there: fx.Node) -> None:
        self.fitted: dict[fx.Node, fx.Node] = {own: there}
        self.bound: dict[str, fx.Node] = {}
        self._torn: tuple[fx.Node, str] | None = None
        queue = [own]
        while queue:
            grown = queue.pop()
            queue += [*self._grow_up(grown), *self._grow_down(grown)]

    def leak(self) -> tuple[fx.Node, str] | None:
        """An inner result that is used elsewhere as well."""
        inside = set(self.fitted.values())
        for own, there in self.fitted.items():
            outside = [user for user in there.users if user not in inside]
            if outside and not any(user.op == "output" for user in own.users):
                user = outside[0]
                what = "returned" if user.op == "output" else f"used by {_name(user)}"
                return there, f"{_name(there)} is {what} as well{_at(user)}"
        return None

    def conflict(self) -> tuple[fx.Node, str] | None:
        """One operand of the pattern that is two values of the graph."""
        return self._torn

    def end(self, ops: Sequence[fx.Node]) -> tuple[fx.Node, str]:
        """The first op of the pattern that is not there, and what is there instead."""
        for own in ops:
            if own in self.fitted:
                continue
            above = next((arg for arg in own.all_input_nodes if arg in self.fitted), None)
            if above is not None:
                return self._end_below(own, self.fitted[above])
            below = next((user for user in own.users if user in self.fitted), None)
            if below is not None:
                return self._end_above(own, below)
        raise AssertionError("a pattern is connected")

    def _end_below(self, own: fx.Node, there: fx.Node) -> tuple[fx.Node, str]:
        taken = set(self.fitted.values())
        users = [user for user in there.users if user not in taken]
        same = [user for user in users if user.target == own.target]
        if same and (reason := _difference(own, same[0])):
            return same[0], reason
        if not users:
            return there, f"the pattern has {_name(own)} after {_name(there)}, the graph nothing"
        names = " and ".join(dict.fromkeys(map(_name, users)))
        return users[0], f"the pattern has {_name(own)} after {_name(there)}, the graph {names}"

    def _end_above(self, own: fx.Node, below: fx.Node) -> tuple[fx.Node, str]:
        there = self.fitted[below]
        for ours, theirs in zip(_flat(below.args), _flat(there.args), strict=False):
            if ours is own:
                if not isinstance(theirs, fx.Node):
                    return (
                        there,
                        f"the pattern gives {_name(there)} a {_name(own)}, the graph {theirs}",
                    )
                reason = _difference(own, theirs) if own.target == theirs.target else ""
                what = f"the pattern gives {_name(there)} a {_name(own)}, the graph {_name(theirs)}"
                return theirs, reason or what
        return there, f"{_name(there)} has other operands than in the pattern"

    def _grow_up(self, own: fx.Node) -> Iterator[fx.Node]:
        there = self.fitted[own]
        for ours, theirs in zip(_flat(own.args), _flat(there.args), strict=False):
            if not isinstance(ours, fx.Node) or not isinstance(theirs, fx.Node):
                continue
            if ours.op == "placeholder":
                known = self.bound.setdefault(ours.name, theirs)
            elif ours in self.fitted:
                known = self.fitted[ours]
            elif _is_alike(ours, theirs):
                self.fitted[ours] = known = theirs
                yield ours
            else:
                continue
            if known is not theirs and self._torn is None:
                reason = f"one operand of the pattern is both {known.name} and {theirs.name} here"
                self._torn = theirs, reason

    def _grow_down(self, own: fx.Node) -> Iterator[fx.Node]:
        there = self.fitted[own]
        taken = set(self.fitted.values())
        for user in own.users:
            if user.op == "output" or user in self.fitted:
                continue
            for candidate in there.users:
                if candidate not in taken and _is_alike(user, candidate):
                    if _places(user, own) == _places(candidate, there):
                        self.fitted[user] = candidate
                        taken.add(candidate)
                        yield user
                        break


def _ops(pattern: fx.Graph) -> list[fx.Node]:
    return [node for node in pattern.nodes if node.op == "call_function"]


def _is_alike(own: fx.Node, there: fx.Node) -> bool:
    """Could it be the same op, its sizes aside?"""
    return own.target == there.target and not _difference(own, there)


def _difference(own: fx.Node, there: fx.Node) -> str:
    """How the plain arguments of two calls of one function differ; sizes may."""
    ours, theirs = _flat(own.args), _flat(there.args)
    if own.target in _SIZED:
        return ""
    if len(ours) != len(theirs):
        return f"{_name(own)} has {len(theirs)} arguments, in the pattern {len(ours)}"
    for one, other in zip(ours, theirs, strict=True):
        is_node = isinstance(one, fx.Node), isinstance(other, fx.Node)
        if is_node == (True, True):
            continue
        if any(is_node) or type(one) is not type(other) or one != other:
            ours_text, theirs_text = (
                "a tensor" if isinstance(x, fx.Node) else str(x) for x in (one, other)
            )
            return f"{_name(own)} takes {theirs_text}, in the pattern {ours_text}"
    return ""


def _numbers(node: fx.Node) -> list[Any]:
    """The plain arguments of a call."""
    return [arg for arg in _flat(node.args) if not isinstance(arg, fx.Node)]


def _flat(args: Any) -> list[Any]:
    if isinstance(args, (tuple, list)):
        return [each for arg in args for each in _flat(arg)]
    return [args]


def _places(user: fx.Node, arg: fx.Node) -> list[int]:
    return [i for i, each in enumerate(_flat(user.args)) if each is arg]


def _name(node: fx.Node) -> str:
    """The op for people: `aten.mul`, `tokenspeed.rope`, `getitem`."""
    if node.op == "placeholder":
        return f"the input {node.name}"
    if node.target is operator.getitem:
        return "getitem"
    return str(node.target).removesuffix(".default").removesuffix(".Tensor")


def _at(node: fx.Node) -> str:
    places = sources_of(node)
    return f" ({places[0]})" if places else ""
