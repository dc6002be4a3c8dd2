"""From a model's class to its program: skeleton, capture, split, expansion. No weight is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, fx, nn

from tokenspeed.compile import torch_api
from tokenspeed.compile.capture import capture, example_ids
from tokenspeed.compile.depth import TooDeep, expand
from tokenspeed.compile.kinds import kind_of, layers_to_capture
from tokenspeed.compile.plan import FunctionPlan, Plan, Program
from tokenspeed.compile.split import split
from tokenspeed.log import logger
from tokenspeed.spans import span

GraphPass = Callable[[fx.Graph], object]
"""Rewrites a captured function in place, before it is split."""


@dataclass(frozen=True)
class Planned:
    """A plan, and its pieces as graphs: what is run eagerly, or compiled."""

    plan: Plan
    pieces: dict[str, fx.GraphModule]


def plan_model(
    make: Callable[[], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
    every_layer: bool = False,
) -> Program:
    """The program of a model whose pieces run eagerly; the rest is as `plan_graphs` says."""
    planned = plan_graphs(make, dtype=dtype, device=device, every_layer=every_layer)
    return Program(planned.plan, {key: piece.forward for key, piece in planned.pieces.items()})


def plan_graphs(
    make: Callable[[], nn.Module],
    *,
    dtype: torch.dtype,
    device: torch.device,
    every_layer: bool = False,
    graph_pass: GraphPass | None = None,
) -> Planned:
    """Plan the model that `make` builds (under any default device and dtype).

    The model has `embed(ids)`, `forward(x, positions)` and `head(rows)`, and its blocks in
    `layers`. Few layers are captured and the plan is repeated for the others; where that cannot be
    done, or with `every_layer`, all are. Raises UnsupportedGraph for a model that has no plan.
    """
    with span("compile.skeleton"):
        skeleton = torch_api.fake_module(make, dtype, device)
    planner = _Planner(skeleton, device, graph_pass)
    x, embed = planner.function("embed", (example_ids(device),))
    hidden, forward = planner.forward((x, example_ids(device)), every_layer)
    _, head = planner.function("head", (hidden,))
    plan = Plan(embed, forward, head)
    assert plan.piece_hashes() == set(planner.pieces)
    return Planned(plan, planner.pieces)


class _Planner:
    """One model being planned; gathers the distinct pieces of its functions."""

    def __init__(
        self, model: nn.Module, device: torch.device, graph_pass: GraphPass | None
    ) -> None:
        self._model = model
        self._device = device
        self._graph_pass = graph_pass
        self.pieces: dict[str, fx.GraphModule] = {}

    def function(self, name: str, inputs: tuple[Tensor, ...]) -> tuple[Tensor, FunctionPlan]:
        """Capture and split one function: an example of its result, its plan."""
        method: Callable[..., Tensor] = getattr(self._model, name)
        with span("compile.capture"):
            captured = capture(method, inputs)
        if self._graph_pass is not None:
            with span("compile.passes"):
                self._graph_pass(captured.graph)
        with span("compile.split"):
            plan, pieces = split(captured)
        self.pieces = pieces | self.pieces
        return captured.example(), plan

    def forward(self, inputs: tuple[Tensor, ...], every_layer: bool) -> tuple[Tensor, FunctionPlan]:
        """The function with the layers in it, from as few of them as will do."""
        layers = list(cast(nn.ModuleList, self._model.layers))
        kinds = [kind_of(layer, i) for i, layer in enumerate(layers)]
        chosen = layers_to_capture(kinds)
        if every_layer or len(chosen) == len(layers):
            return self.function("forward", inputs)
        before = self.pieces
        try:
            self._keep(layers, chosen)
            result, short = self.function("forward", inputs)
            plan = expand(short, chosen, kinds)
        except TooDeep as error:
            logger.warning("every layer is captured, start-up takes longer: %s", error)
            self.pieces = before
            self._keep(layers, range(len(layers)))
            return self.function("forward", inputs)
        logger.debug("captured layers %s of %d", chosen, len(layers))
        return result, plan

    def _keep(self, layers: Sequence[nn.Module], indices: Sequence[int]) -> None:
        self._model.layers = nn.ModuleList(layers[i] for i in indices)
