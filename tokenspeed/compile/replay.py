"""Replay a step through the pieces, and measure what each pass changes.

A piece's graph is kept as it was before each pass that changed it. On the same activations, what
two neighbouring stages return may differ by rounding alone; a difference above the tolerance is
made by the pass between them. Activations are those of the model as it is written, whatever a pass
made of an earlier piece, so an error is seen where it is made and nowhere else.

    stage 0 --noop--> stage 1 --add_rms_norm--> stage 2 --silu_mul--> ...
       |                 |                         |
     results           results                   results
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor, fx, nn

from tokenspeed.compile import inductor_api, torch_api
from tokenspeed.compile.explanation import piece_names
from tokenspeed.compile.matcher import InductorPass
from tokenspeed.compile.plan import Piece, PieceCall, Plan
from tokenspeed.passes.manager import PassManager
from tokenspeed.passes.rewrite import TokenRange

TOLERANCES = {torch.float32: 1e-4, torch.float16: 8e-3, torch.bfloat16: 6e-2}
"""Of |a - b| / (|b| + rms(b)), by the model's dtype: what another order of sums may make, and the
rounding of a few intermediates that a fused op keeps wide. In units of the dtype's last place, a
few; a pass that computes something else is off by more in some element of some layer.
"""

LOWERING = "inductor"
"""Stands for a pass where the compiled piece departs from what the passes left."""

TRACING = "tracing"
"""Stands for a pass where the graph departs from the piece as it was captured."""


_FEW = 7


class Deviation(msgspec.Struct, frozen=True):
    """How far a pass moved a piece's results in a step of `tokens`, in its call behind the
    attention of `layer` (or before that of layer 0).
    """

    rule: str
    piece: str
    token_range: str
    tokens: int
    layer: int
    error: float
    tolerance: float

    @property
    def is_wrong(self) -> bool:
        return not self.error <= self.tolerance  # an error that is no number is wrong as well


class Stages:
    """A piece for one token range, as it was before each pass that changed it, and at the end."""

    def __init__(self, piece: fx.GraphModule, manager: PassManager) -> None:
        inputs = [
            torch_api.example_value(node) for node in piece.graph.find_nodes(op="placeholder")
        ]
        inductor_api.visit_slot(piece, inputs, InductorPass(manager))
        names = [name for name, _ in manager.stages]
        self._rules = [TRACING, *names[:-1]]
        self._graphs = [fx.GraphModule(nn.Module(), graph) for _, graph in manager.stages]

    def results(self, args: Sequence[Any]) -> Iterator[tuple[str, tuple[Any, ...]]]:
        """What each stage returns, after the name of the pass that made it."""
        for rule, graph in zip(self._rules, self._graphs, strict=True):
            yield rule, graph(*args)


class Replay:
    """Runs in the place of pieces, and measures as they are called. `stages` and `compiled` are by
    the pieces' hashes; `compiled` may lack some.
    """

    def __init__(
        self,
        plan: Plan,
        stages: Mapping[str, Mapping[str, Stages]],
        compiled: Mapping[str, Piece],
        dtype: torch.dtype,
    ) -> None:
        self.found: list[Deviation] = []
        self._stages = stages
        self._compiled = compiled
        self._names = piece_names(plan)
        self._layers = _layers(plan)
        self._tolerance = TOLERANCES[dtype]
        self._calls: Counter[str] = Counter()
        self._step = ("", 0)

    def restart(self, token_range: str, num_tokens: int) -> None:
        """A step begins that this range serves."""
        self._step = token_range, num_tokens
        self._calls.clear()

    def wrapped(self, key: str, piece: Callable[..., tuple[Any, ...]]) -> Piece:
        """The piece as it was captured; each call is measured."""

        def call(*args: Any) -> tuple[Any, ...]:
            results = piece(*args)
            self._measure(key, args, results)
            return results

        return call

    def _measure(self, key: str, args: Sequence[Any], plain: Sequence[Any]) -> None:
        layer = self._layers[key][self._calls[key]]
        self._calls[key] += 1
        by_range = self._stages[key]
        wanted, num_tokens = self._step
        token_range = wanted if wanted in by_range else next(iter(by_range))

        def note(rule: str, error: float) -> None:
            place = (self._names[key], token_range, num_tokens, layer)
            self.found.append(Deviation(rule, *place, error, self._tolerance))

        before = plain
        for rule, after in by_range[token_range].results(args):
            note(rule, error_of(after, before))
            before = after
        if key in self._compiled:
            note(LOWERING, error_of(self._compiled[key](*args), before))


def _layers(plan: Plan) -> dict[str, list[int]]:
    """For each piece, the layer of each of its calls: that of the attention before it (the rest of
    that layer, and the beginning of the next), and the first layer where there is none before.
    """
    found: dict[str, list[int]] = {}
    for function in (plan.embed, plan.forward, plan.head):
        num_attended = 0
        for row in function.rows:
            if isinstance(row, PieceCall):
                found.setdefault(row.piece, []).append(max(num_attended - 1, 0))
            else:
                num_attended += 1
    return found


def error_of(results: Sequence[Any], expected: Sequence[Any]) -> float:
    """The largest |a - b| / (|b| + rms(b)) over all results; infinite where shapes differ."""
    return max((_error(a, b) for a, b in zip(results, expected, strict=True)), default=0.0)


def _error(one: Any, other: Any) -> float:
    if not isinstance(other, Tensor):
        return 0.0 if one == other else float("inf")
    if one.shape != other.shape or one.dtype != other.dtype:
        return float("inf")
    if not other.numel() or torch.equal(one, other):
        return 0.0
    a, b = one.double(), other.double()
    scale = b.abs() + b.square().mean().sqrt()
    return float(((a - b).abs() / scale.clamp_min(1e-30)).nan_to_num(nan=float("inf")).max())


def worst(found: Sequence[Deviation]) -> list[Deviation]:
    """The largest deviation of each pass in each piece and range, in order of appearance."""
    largest: dict[tuple[str, str, str], Deviation] = {}
    for each in found:
        key = (each.rule, each.piece, each.token_range)
        if key not in largest or largest[key].error < each.error:
            largest[key] = each
    return list(largest.values())


def token_counts(token_range: TokenRange) -> list[int]:
    """Steps to replay for a range: of one token, if it serves that, and of a few."""
    few = token_range.first + _FEW
    return [1, few] if token_range.first <= 1 else [few]
