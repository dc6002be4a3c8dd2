"""The second half of `torch_api`: private torch interfaces that find and replace in graphs.

A pass says what to replace by what; here it meets Inductor's pattern matcher, its decompositions
and its slot for custom passes. torch 2.11 to 2.13. Importing this file imports Inductor (seconds).
Each function has a test that fails if torch takes its interface away.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch._inductor import pattern_matcher
from torch._inductor.custom_graph_pass import CustomGraphPass

from tokenspeed.compile.nearest import Binding, first_difference, nearest_of
from tokenspeed.passes import PASS_NAMES, PIPELINE, Stage
from tokenspeed.passes.manager import PassManager, Step
from tokenspeed.passes.rewrite import (
    EVERY,
    Case,
    Inline,
    Miss,
    Pass,
    PassContext,
    Rewrite,
    TokenRange,
)
from tokenspeed.passes.shapes import epsilons, scales
from tokenspeed.passes.sources import KEY, inherit, sources_of

_SOME_EPS = 1e-6
"""What to trace a norm with, to look for something like it in a graph that has none."""


class Matcher:
    """A Rewrite as a graph pass. Patterns are traced when a graph first needs them, and kept."""

    def __init__(self, rule: Rewrite, dtype: torch.dtype) -> None:
        self.refused: list[str] = []
        self._rule = rule
        self._dtype = dtype
        self._patterns: dict[PassContext, pattern_matcher.PatternMatcherPass] = {}
        self._replaced: list[fx.Node] = []

    def __call__(self, graph: fx.Graph) -> int:
        if not self._rule.expected(graph):
            return 0
        context = PassContext(self._dtype, epsilons(graph), scales(graph))
        if context not in self._patterns:
            self._patterns[context] = self._traced(context)
        count = int(self._patterns[context].apply(graph))
        self._pass_on(graph)
        return count

    def nearest(self, graph: fx.Graph) -> Miss | None:
        """The nearest miss in a graph that was left without (another) match."""
        context = PassContext(self._dtype, epsilons(graph) or (_SOME_EPS,), scales(graph) or (1.0,))
        cases, patterns = _cases_traced(self._rule, context)

        def refuse(pattern: fx.Graph, bound: Binding) -> Miss | None:
            return self._refusal(cases[patterns.index(pattern)], pattern, bound, graph)

        return nearest_of(patterns, graph, refuse)

    def _refusal(
        self, case: Case, pattern: fx.Graph, bound: Binding, graph: fx.Graph
    ) -> Miss | None:
        """Why a pattern whose every op is there was not replaced: its check, or its sizes."""
        names = list(inspect.signature(self._rule.pattern).parameters)
        inputs = [bound[node.name] for node in pattern.find_nodes(op="placeholder")]
        nodes = dict(zip(names, inputs, strict=False))
        operands = {name: node.meta["val"] for name, node in nodes.items()}
        total = sum(node.op == "call_function" for node in pattern.nodes)
        computed = self._computed(nodes)
        reason = computed or self._rule.check({**operands, **case.numbers})
        if reason is None:
            exact = trace(_bound(self._rule.pattern, case), [node.meta["val"] for node in inputs])
            return first_difference(exact.graph, graph)
        check = f"{self._rule.name}.{'given' if computed else 'check'}"
        named = nodes.get(reason.split()[0], inputs[0])
        user = next(user for user in named.users if user.op == "call_function")
        return Miss(total, total, user.name, sources_of(user), reason, check)

    def _traced(self, context: PassContext) -> pattern_matcher.PatternMatcherPass:
        patterns = pattern_matcher.PatternMatcherPass(pass_name=self._rule.name)
        for case in self._rule.cases(context):
            pattern_matcher.register_replacement(
                _bound(self._rule.pattern, case),
                _bound(self._rule.replacement, case),
                list(case.inputs),
                pattern_matcher.fwd_only,
                patterns,
                extra_check=self._may_replace,
            )
        return patterns

    def _may_replace(self, match: pattern_matcher.Match) -> bool:
        operands = {
            name: value.meta["val"] if isinstance(value, fx.Node) else value
            for name, value in match.kwargs.items()
        }
        reason = self._computed(match.kwargs) or self._rule.check(operands)
        if reason is not None:
            self.refused.append(reason)
            return False
        self._pass_on(match.nodes[0].graph)
        self._replaced = list(match.nodes)
        return True

    def _pass_on(self, graph: fx.Graph) -> None:
        """What is new in the graph came in the place of the last match."""
        inherit((node for node in graph.nodes if KEY not in node.meta), self._replaced)
        self._replaced = []

    def _computed(self, nodes: Mapping[str, Any]) -> str | None:
        """Which operand is computed, and has to be given, or None."""
        values = {name: nodes.get(name) for name in self._rule.given}
        computed = [
            n for n, v in values.items() if isinstance(v, fx.Node) and v.op != "placeholder"
        ]
        return f"{computed[0]} is no input of the graph" if computed else None


@functools.cache
def _cases_traced(rule: Rewrite, context: PassContext) -> tuple[Sequence[Case], Sequence[fx.Graph]]:
    """A rule's cases, and the trace of each: made once for all pieces, token ranges and graphs, of
    which a silent pass is asked about each.
    """
    cases = rule.cases(context)
    traces = [
        pattern_matcher.fwd_only(_bound(rule.pattern, case), list(case.inputs)) for case in cases
    ]
    return cases, [trace.graph for trace in traces]


def _bound(function: Callable[..., Any], case: Case) -> Callable[..., Any]:
    """`function` of its operands alone: its numbers given, and gone from its signature."""
    operands = list(inspect.signature(function).parameters.values())[: len(case.inputs)]

    def call(*args: Any) -> Any:
        return function(*args, **case.numbers)

    call.__signature__ = inspect.Signature(operands)  # type: ignore[attr-defined]
    call.__name__ = function.__name__
    return call


def trace(function: Callable[..., Any], args: Sequence[Any]) -> fx.GraphModule:
    """The functional aten graph of `function`, as Inductor decomposes it."""
    mode = detect_fake_mode(args)
    assert mode is not None, "operands to trace with must be fake tensors"
    with mode:
        graph_module: fx.GraphModule = pattern_matcher.fwd_only(function, args)
    return graph_module


def inline(rule: Inline, graph: fx.Graph) -> int:
    """Replace each call of a fused op by its reference's trace."""
    count = 0
    for node in list(graph.nodes):
        reference = rule.references.get(node.target) if node.op == "call_function" else None
        if reference is not None:
            _splice(graph, node, reference)
            count += 1
    return count


def _splice(graph: fx.Graph, node: fx.Node, reference: Callable[..., Any]) -> None:
    values = fx.node.map_arg(node.args, lambda arg: arg.meta["val"])
    operands = [arg for arg in node.args if isinstance(arg, fx.Node)]
    numbers = values[len(operands) :]
    body = trace(lambda *tensors: reference(*tensors, *numbers), values[: len(operands)]).graph
    inner = dict(zip(body.find_nodes(op="placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        results: Any = graph.graph_copy(body, inner)
    inherit((inner[each] for each in body.nodes if each in inner), [node])
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    graph.erase_node(node)


class InductorPass(CustomGraphPass):
    """A manager in Inductor's slot for passes; its uuid is part of Inductor's cache keys."""

    def __init__(self, manager: PassManager) -> None:
        self.manager = manager

    def __call__(self, graph: fx.Graph) -> None:
        self.manager(graph)

    def uuid(self) -> str:
        return self.manager.uuid()


def pass_manager(
    stage: Stage,
    *,
    dtype: torch.dtype,
    device: str,
    token_range: TokenRange = EVERY,
    fuses_prologue: bool = False,
    disabled: Sequence[str] = (),
    strict: bool = False,
) -> PassManager:
    """The passes of a stage for a model's dtype and a device type ("cpu" or "cuda").

    `fuses_prologue`: what the attention backend in use declares. `disabled`: names of passes to
    leave out; an unknown one is a ValueError.
    """
    if unknown := sorted(set(disabled) - PASS_NAMES):
        raise ValueError(
            f"no pass is named {unknown[0]!r}: they are {', '.join(sorted(PASS_NAMES))}"
        )
    steps = []
    for row in PIPELINE:
        if row.stage is stage:
            off = row.why_off(device, token_range, fuses_prologue, disabled)
            steps.append(_step(row.rule, dtype, off))
    return PassManager(
        steps,
        token_range=token_range,
        options={"dtype": str(dtype), "device": device},
        sources=[Path(__file__)],
        strict=strict,
    )


def _step(rule: Pass, dtype: torch.dtype, off: str | None) -> Step:
    if isinstance(rule, Rewrite):
        matcher = Matcher(rule, dtype)
        return Step(rule.name, matcher, rule.expected, off, matcher.refused, matcher.nearest)
    if isinstance(rule, Inline):
        return Step(rule.name, functools.partial(inline, rule), None, off)
    return Step(rule.name, rule.run, rule.expected, off, nearest=rule.nearest)
