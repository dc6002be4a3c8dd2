"""Pieces as CUDA graphs, with the sequence calls between them run anew.

    [embed, pieces] -> attend -> [pieces] -> attend -> ... -> attend -> the last pieces, as they are
       a graph                    a graph

For steps whose attention is planned on the host, and which are so short that the host would be
slower to launch their kernels than the device is to run them. A sequence call finds its arguments
where the graph in front of it leaves them, and must leave its result where the graph behind it
looks: in a buffer that all calls share.

What a graph leaves is overwritten by later ones as soon as nothing of the step needs it, just as if
the step ran without graphs: the slots here hold addresses, and keep no memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed.compile.cudagraph import GraphPool, address_of
from tokenspeed.compile.runner import X_SLOT, Executable, PlanStep, run_steps


class _Stage(NamedTuple):
    """A graph, or without CUDA the `pieces` themselves, and the call behind them."""

    graph: torch.cuda.CUDAGraph | None
    pieces: list[PlanStep]
    call: PlanStep


class PiecewiseForward:
    """`embed` and `forward` of `size` tokens. Write `ids` and `positions`, int64 [size], and plan
    the sequence calls before; a step of fewer tokens leaves the last ones as they are.
    """

    def __init__(self, executable: Executable, size: int, pool: GraphPool, results: Tensor) -> None:
        """Record. Sequence calls are run meanwhile, and leave their results in `results`, from its
        first element on. The same must have been run without graphs before: kernels are compiled.
        """
        self.ids = torch.zeros(size, dtype=torch.int64, device=pool.device)
        self.positions = torch.zeros_like(self.ids)
        self.results = results
        self._layers = executable.layers
        self._values = self._layers.begin(self.ids, self.positions)
        self._values[X_SLOT] = None
        self._stages: list[_Stage] = []
        embed = PlanStep(executable.embed, lambda _: (self.ids,), X_SLOT, 0, (), ())
        with torch.no_grad():
            self._record(embed, pool)

    def __call__(self, rows: Tensor | None = None) -> Tensor:
        """Hidden states [size, hidden], or those of the tokens `rows`."""
        values = self._values.copy()
        with torch.no_grad():
            for graph, pieces, call in self._stages:
                if graph is None:
                    run_steps(pieces, values)
                else:
                    graph.replay()
                values[call.begin] = self._result(call, values)
            return self._layers.finish(values, rows)

    def _record(self, embed: PlanStep, pool: GraphPool) -> None:
        values, pieces = self._values.copy(), [embed]
        calls = [step for step in self._layers.steps if step.is_call]
        needed = {
            X_SLOT,
            *self._layers.read_by_tail,
            *(slot for call in calls for slot in call.read),
        }
        for step in self._layers.steps:
            if not step.is_call:
                pieces.append(step)
                continue
            with pool.recording() as graph:
                run_steps(pieces, values)
            if graph is not None:
                for slot in needed:
                    if isinstance(values[slot], Tensor) and self._values[slot] is None:
                        self._values[slot] = address_of(values[slot])
            values[step.begin] = self._result(step, values)
            for slot in step.dead:
                values[slot] = None
            self._stages.append(_Stage(graph, [] if graph else pieces, step))
            pieces = []

    def _result(self, call: PlanStep, values: list[Any]) -> Tensor:
        result: Tensor = call.run(*call.pick(values))
        assert result.data_ptr() == self.results.data_ptr(), "a result where no graph looks"
        return result
