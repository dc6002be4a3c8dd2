"""Repeat the plan of a few captured layers for the real depth.

Rows are grouped into segments: layer i's rows up to its (last) sequence call, and the tail behind
the last one. Each segment is described relative to its layer, segments with the same last three
kinds must read the same, and a segment is then written out for every real layer:

    captured   embed   piece attend     piece attend     piece attend     piece      kinds f f f
    relative   own layer, weights of layer 0 and -1, values of segment 0, -1 and the first
    expanded           piece attend     piece attend     piece attend ... piece      f f f f ...

Where a model's dataflow reaches further than that, `expand` refuses, and the caller captures every
layer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from tokenspeed.compile.kinds import Window, windows
from tokenspeed.compile.plan import (
    Argument,
    Constant,
    FunctionPlan,
    PieceCall,
    Row,
    SequenceRow,
    Value,
    Weight,
)
from tokenspeed.kernels.tables import SEQUENCE_CALLS

_LAYER_PATH = re.compile(r"layers\.(\d+)\.(.+)")


class TooDeep(ValueError):
    """The captured layers do not determine the others."""


@dataclass(frozen=True)
class _LayerWeight:
    """A weight of the layer `offset` (0 or -1) from the segment's own, whose path is relative to
    that layer.
    """

    offset: int
    weight: Weight


@dataclass(frozen=True)
class _SegmentValue:
    """A result of row `row` of the segment `offset` (0 or -1) away, or of the first (None)."""

    offset: int | None
    row: int
    output: int


@dataclass(frozen=True)
class _OwnLayer:
    """The layer index of a sequence call."""


_Relative = _LayerWeight | _SegmentValue | _OwnLayer | Argument
_Template = tuple[tuple[Row, tuple[_Relative, ...]], ...]
"""A segment: rows stripped of their arguments, and the arguments relative to the segment."""


def expand(short: FunctionPlan, captured: Sequence[int], kinds: Sequence[str]) -> FunctionPlan:
    """The plan of all layers (`kinds[i]` is layer i's), from that of the layers `captured`.

    Raises TooDeep where it is not determined by it.
    """
    segments = _Segments(short, captured)
    templates: dict[Window, _Template] = {}
    pieces: dict[tuple[str, str], list[str]] = {}
    for number, window in enumerate(windows([kinds[i] for i in captured])):
        template = segments.template(number)
        names = [row.piece for row, _ in template if isinstance(row, PieceCall)]
        if pieces.setdefault(window[1:], names) != names:
            raise TooDeep("equal layers compute different things, depending on their place")
        if templates.setdefault(window, template) != template:
            raise TooDeep("equal layers are wired differently")
    written = [templates[window] for window in windows(kinds)]
    bases = [0]
    for template in written:
        bases.append(bases[-1] + len(template))
    rows = tuple(
        msgspec.structs.replace(row, args=tuple(_absolute(a, number, bases) for a in args))
        for number, template in enumerate(written)
        for row, args in template
    )
    tail = len(captured)
    output = _absolute(segments.relative(short.output, tail), len(kinds), bases)
    return FunctionPlan(rows, output)


class _Segments:
    """The rows of a captured plan by segment, and what they use in the words of the segment."""

    def __init__(self, plan: FunctionPlan, captured: Sequence[int]) -> None:
        self._captured = captured
        self._rows: list[list[Row]] = [[]]
        self._place: list[tuple[int, int]] = []
        layers = [_layer_of(row) for row in plan.rows]
        for i, row in enumerate(plan.rows):
            self._place.append((len(self._rows) - 1, len(self._rows[-1])))
            self._rows[-1].append(row)
            following = next((n for n in layers[i + 1 :] if n is not None), None)
            if layers[i] is not None and layers[i] != following:
                self._rows.append([])
        found = [layer for layer in layers if layer is not None]
        if list(dict.fromkeys(found)) != list(captured) or len(self._rows) != len(captured) + 1:
            raise TooDeep("the layers do not make their sequence calls in order, each its own")

    def template(self, number: int) -> _Template:
        return tuple(
            (msgspec.structs.replace(row, args=()), self._row_args(row, number))
            for row in self._rows[number]
        )

    def relative(self, arg: Argument, number: int) -> _Relative:
        if isinstance(arg, Value):
            segment, row = self._place[arg.row]
            if segment not in (number, number - 1, 0):
                raise TooDeep(f"a layer uses a result of the layer {number - segment} before it")
            return _SegmentValue(
                segment - number if segment >= number - 1 else None, row, arg.output
            )
        if isinstance(arg, Weight) and (found := _LAYER_PATH.fullmatch(arg.path)):
            offset = int(found[1]) - number
            if offset not in (0, -1):
                raise TooDeep(f"a layer uses {arg.path} of another layer")
            return _LayerWeight(offset, msgspec.structs.replace(arg, path=found[2]))
        return arg

    def _row_args(self, row: Row, number: int) -> tuple[_Relative, ...]:
        args = [self.relative(arg, number) for arg in row.args]
        if isinstance(row, SequenceRow):
            args[SEQUENCE_CALLS[row.op].layer_arg] = _OwnLayer()
        return tuple(args)


def _layer_of(row: Row) -> int | None:
    """The layer index that a sequence call names."""
    if isinstance(row, PieceCall):
        return None
    layer = row.args[SEQUENCE_CALLS[row.op].layer_arg]
    if not isinstance(layer, Constant) or not isinstance(layer.value, int):
        raise TooDeep("a sequence call's layer is not a constant")
    return layer.value


def _absolute(arg: _Relative, number: int, bases: Sequence[int]) -> Argument:
    """A relative argument as written in segment `number`, whose rows start at `bases[number]`."""
    if isinstance(arg, _OwnLayer):
        return Constant(number)
    if isinstance(arg, _LayerWeight):
        path = f"layers.{number + arg.offset}.{arg.weight.path}"
        return msgspec.structs.replace(arg.weight, path=path)
    if isinstance(arg, _SegmentValue):
        base = bases[0 if arg.offset is None else number + arg.offset]
        return Value(base + arg.row, arg.output)
    return arg
