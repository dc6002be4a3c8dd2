"""The plan: what is run, in which order, on which weights, as plain data.

A function of the model is a list of rows. A row calls a piece (named by its structure hash) or a
sequence call, on arguments that are weights, results of earlier rows, inputs, or constants. Nothing
here needs torch: a plan is read, compared and stored as JSON. A program is a plan with its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

Piece = Callable[..., tuple[Any, ...]]
"""What a row runs: it takes its inputs by position and returns the tuple of its results."""


class TokenArgument(msgspec.Struct, frozen=True):
    """Where a piece finds the token count: an argument is it (`is_count`), or has it in front."""

    index: int
    is_count: bool


class Weight(msgspec.Struct, frozen=True, tag="weight"):
    """A parameter or buffer by its path in the model, and what the piece expects of it."""

    path: str
    shape: tuple[int, ...]
    dtype: str


class Value(msgspec.Struct, frozen=True, tag="value"):
    """Result number `output` of row `row`."""

    row: int
    output: int


class Input(msgspec.Struct, frozen=True, tag="input"):
    """Positional argument number `index` of the function."""

    index: int


class Tokens(msgspec.Struct, frozen=True, tag="tokens"):
    """The token count: dimension 0 of every input."""


class Constant(msgspec.Struct, frozen=True, tag="constant"):
    """A plain argument of a sequence call: the layer index, or an operand left out."""

    value: int | None


class Number(msgspec.Struct, frozen=True, tag="number"):
    """A finite float of a sequence call: a norm's eps. No `Constant`, because equal arguments are
    one, and 0.0 equals the index 0. Raises ValueError for what JSON cannot hold.
    """

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"a plan holds finite numbers, not {self.value}")


Argument = Weight | Value | Input | Tokens | Constant | Number


class PieceCall(msgspec.Struct, frozen=True, tag="piece"):
    """Run the piece whose structure hash is `piece`; it returns `num_outputs` results."""

    piece: str
    args: tuple[Argument, ...]
    num_outputs: int


class SequenceRow(msgspec.Struct, frozen=True, tag="sequence"):
    """Run the sequence call `op`, a name in `SEQUENCE_CALLS`; it returns one result."""

    op: str
    args: tuple[Argument, ...]


Row = PieceCall | SequenceRow


class FunctionPlan(msgspec.Struct, frozen=True):
    """One function of the model. Rows are in order: each uses only results of rows before it."""

    rows: tuple[Row, ...]
    output: Argument


class Plan(msgspec.Struct, frozen=True):
    """The three functions of a model."""

    embed: FunctionPlan
    forward: FunctionPlan
    head: FunctionPlan

    def piece_calls(self) -> dict[str, PieceCall]:
        """For each piece's hash a row that calls it: how many inputs and results it has."""
        functions = (self.embed, self.forward, self.head)
        rows = (row for function in functions for row in function.rows)
        return {row.piece: row for row in rows if isinstance(row, PieceCall)}

    def piece_hashes(self) -> set[str]:
        return set(self.piece_calls())


@dataclass(frozen=True)
class Program:
    """A plan, and the pieces that it names by their hashes."""

    plan: Plan
    pieces: dict[str, Piece]


def encode(plan: Plan) -> str:
    """The plan as JSON."""
    return msgspec.json.encode(plan).decode()


def decode(text: str) -> Plan:
    """Read JSON written by `encode`. Raises msgspec.ValidationError or DecodeError on anything
    else.
    """
    return msgspec.json.decode(text, type=Plan)
