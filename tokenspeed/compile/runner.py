"""Run a program on a model's weights.

All that can be settled before the first step is: a row becomes a callable with the slots it reads
and writes, weights and constants already lie in their slots, and a result is dropped after its last
use. A step is then one loop without a look-up by name, the same for eager and compiled pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokenspeed.compile.plan import (
    Argument,
    Constant,
    FunctionPlan,
    Input,
    Number,
    Piece,
    PieceCall,
    Program,
    Row,
    Tokens,
    Value,
    Weight,
)
from tokenspeed.kernels.tables import SEQUENCE_CALLS


class PlanStep(NamedTuple):
    """A row of a plan, with its arguments and results by slot."""

    run: Callable[..., Any]
    pick: Callable[[list[Any]], tuple[Any, ...]]
    """Its arguments out of all slots."""
    begin: int
    """Where its results go, up to `end`."""
    end: int
    """0: the result is a bare tensor, that of a sequence call."""
    read: tuple[int, ...]
    """The slots of its arguments."""
    dead: tuple[int, ...]
    """The slots that nothing reads afterwards."""

    @property
    def is_call(self) -> bool:
        """Is it a sequence call, or else a piece?"""
        return self.end == 0


X_SLOT = 1
"""The slot of a function's first input; slot 0 is T."""


class BindingError(ValueError):
    """The model's weights are not those that the program was planned for."""


class Executable:
    """The functions of a model, run through its program. Weights are looked up once, here: load
    them into the model's tensors before, or in place later.
    """

    def __init__(self, program: Program, model: nn.Module) -> None:
        weights: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
        weights |= dict(model.named_buffers(remove_duplicate=False))
        self.num_weights = sum(weight.numel() for weight in set(weights.values()))
        plan, pieces = program.plan, program.pieces
        self._embed = Function(plan.embed, 1, pieces, weights)
        self.layers = Function(plan.forward, 2, pieces, weights)
        self._head = Function(plan.head, 1, pieces, weights)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [T] -> x [T, hidden]."""
        return self._embed(ids)

    def forward(self, x: Tensor, positions: Tensor, rows: Tensor | None = None) -> Tensor:
        """x [T, hidden] and positions [T] -> hidden states [T, hidden], or those of the tokens
        `rows` alone, int64 [R] with R > 0: what comes behind the last sequence call works token by
        token, and then on no others.
        """
        return self.layers(x, positions, rows=rows)

    def head(self, rows: Tensor) -> Tensor:
        """Hidden states [N, hidden] -> logits [N, vocabulary]."""
        return self._head(rows)


class Function:
    """One function's steps over a list of slots: T, inputs, weights and constants, results."""

    def __init__(
        self,
        plan: FunctionPlan,
        num_inputs: int,
        pieces: Mapping[str, Piece],
        weights: Mapping[str, Tensor],
    ) -> None:
        self._initial: list[Any] = [None] * (X_SLOT + num_inputs)
        self._slots: dict[Argument, int] = {Tokens(): 0}
        self._slots |= {Input(i): X_SLOT + i for i in range(num_inputs)}
        for arg in (arg for row in plan.rows for arg in row.args):
            if isinstance(arg, Weight | Constant | Number) and arg not in self._slots:
                self._slots[arg] = len(self._initial)
                self._initial.append(_bind(arg, weights) if isinstance(arg, Weight) else arg.value)
        for number, row in enumerate(plan.rows):
            for output in range(row.num_outputs if isinstance(row, PieceCall) else 1):
                self._slots[Value(number, output)] = len(self._initial)
                self._initial.append(None)
        self._result = self._slots[plan.output]
        self._inputs = slice(X_SLOT, X_SLOT + num_inputs)
        tail, dead = _tail(plan), _dead_values(plan)
        steps = [
            self._step(number, row, pieces, dead[number]) for number, row in enumerate(plan.rows)
        ]
        self.steps = steps[:tail]
        """Up to the last sequence call."""
        self._tail = steps[tail:]
        self.read_by_tail = sorted(self._slots[arg] for arg in _read_by_tail(plan, tail))
        """The slots that `finish` needs: of tensors by token."""

    def __call__(self, *inputs: Tensor, rows: Tensor | None = None) -> Tensor:
        values = self.begin(*inputs)
        with torch.no_grad():
            run_steps(self.steps, values)
            return self.finish(values, rows)

    def begin(self, *inputs: Tensor) -> list[Any]:
        """All slots before the first step."""
        values = self._initial.copy()
        values[0] = inputs[0].shape[0]
        values[self._inputs] = inputs
        return values

    def finish(self, values: list[Any], rows: Tensor | None = None) -> Tensor:
        """The result, from the slots as `steps` leave them: of all tokens, or of `rows` alone."""
        if rows is not None:
            total, values[0] = values[0], rows.shape[0]
            for slot in self.read_by_tail:
                assert values[slot].shape[0] == total, f"{values[slot].shape} is not by token"
                values[slot] = values[slot][rows]
        run_steps(self._tail, values)
        result: Tensor = values[self._result]
        return result

    def _step(
        self, number: int, row: Row, pieces: Mapping[str, Piece], dead: list[Value]
    ) -> PlanStep:
        slots = tuple(self._slots[arg] for arg in row.args)
        pick = itemgetter(*slots) if len(slots) > 1 else lambda v: tuple(v[slot] for slot in slots)
        begin = self._slots[Value(number, 0)]
        freed = tuple(self._slots[value] for value in dead)
        if isinstance(row, PieceCall):
            end = begin + row.num_outputs
            return PlanStep(pieces[row.piece], pick, begin, end, slots, freed)
        return PlanStep(SEQUENCE_CALLS[row.op].run, pick, begin, 0, slots, freed)


def run_steps(steps: Sequence[PlanStep], values: list[Any]) -> None:
    """Run them one after the other, from and into the slots."""
    for run, pick, begin, end, _, dead in steps:
        if end:
            values[begin:end] = run(*pick(values))
        else:
            values[begin] = run(*pick(values))
        for slot in dead:
            values[slot] = None


def _tail(plan: FunctionPlan) -> int:
    """Where the rows behind the last sequence call begin."""
    calls = [number for number, row in enumerate(plan.rows) if not isinstance(row, PieceCall)]
    return calls[-1] + 1 if calls else 0


def _read_by_tail(plan: FunctionPlan, tail: int) -> set[Argument]:
    """The tensors of tokens that rows from `tail` on, or the caller, take from those before."""
    read = {arg for row in plan.rows[tail:] for arg in row.args} | {plan.output}
    return {
        arg for arg in read if isinstance(arg, Input) or (isinstance(arg, Value) and arg.row < tail)
    }


def _bind(weight: Weight, weights: Mapping[str, Tensor]) -> Tensor:
    tensor = weights.get(weight.path)
    if tensor is None:
        raise BindingError(f"the program needs {weight.path}, which the model does not have")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tuple(tensor.shape) != weight.shape or dtype != weight.dtype:
        raise BindingError(
            f"{weight.path} is {dtype} {list(tensor.shape)}, but the program was planned for "
            f"{weight.dtype} {list(weight.shape)}"
        )
    return tensor


def _dead_values(plan: FunctionPlan) -> list[list[Value]]:
    """For each row, the results that nothing reads after it."""
    last = {arg: i for i, row in enumerate(plan.rows) for arg in row.args if isinstance(arg, Value)}
    dead: list[list[Value]] = [[] for _ in plan.rows]
    for value, number in last.items():
        if value != plan.output:
            dead[number].append(value)
    return dead
