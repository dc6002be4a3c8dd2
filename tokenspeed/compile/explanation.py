"""What an entry tells about its program, put together from its plan and receipts, as plain data.

Pieces get names for people: `embed`, `forward 1` and so on in the order in which they run, `head`.
"""

from __future__ import annotations

import itertools
from collections import Counter

import msgspec

from tokenspeed.compile import graph_receipt, plan, receipt
from tokenspeed.compile.entry import GRAPHS, PLAN, RECEIPT, Damaged, Entry
from tokenspeed.compile.graph_receipt import PieceMiss, PieceReceipt
from tokenspeed.compile.plan import Argument, FunctionPlan, Input, PieceCall, Plan, Tokens, Weight
from tokenspeed.passes.manager import PassReport

FUNCTION = "whole function"
"""Stands for a piece where a pass ran over a captured function."""


class InputView(msgspec.Struct, frozen=True):
    """What a piece is given when it is first called, and the value's dtype and shape."""

    source: str
    value: str


class RangeView(msgspec.Struct, frozen=True):
    """A piece for one token range: what its passes did, its graphs and its kernels."""

    passes: list[PassReport]
    graphs: PieceReceipt

    @property
    def num_before(self) -> int:
        return sum(op.moves for op in self.graphs.before)

    @property
    def num_after(self) -> int:
        return sum(op.moves for op in self.graphs.after)


class PieceView(msgspec.Struct, frozen=True):
    """A distinct piece: `calls` of it make a step."""

    name: str
    hash: str
    calls: int
    inputs: list[InputView]
    outputs: list[str]
    ranges: dict[str, RangeView]


class FunctionPasses(msgspec.Struct, frozen=True):
    """Passes over a captured function, before it is split."""

    name: str
    passes: list[PassReport]


class Explanation(msgspec.Struct, frozen=True):
    """All of it. `layers` counts sequence calls a step; `layer` names the piece that runs most."""

    entry: str
    layers: int
    layer: str
    functions: list[FunctionPasses]
    pieces: list[PieceView]
    misses: list[PieceMiss]
    seconds: dict[str, float]

    def misses_of(self, rule: str, piece: str, token_range: str) -> list[PieceMiss]:
        wanted = (rule, piece, token_range)
        return [each for each in self.misses if (each.rule, each.piece, each.token_range) == wanted]


def explanation_of(entry: Entry) -> Explanation:
    """Raises Damaged for receipts that are not what this version writes."""
    try:
        program = plan.decode(entry.files[PLAN].decode())
        counts = receipt.decode(entry.files[RECEIPT])
        pictures = graph_receipt.decode(entry.files[GRAPHS])
        return _explain(entry.folder.name, program, counts, pictures)
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Damaged(f"its receipts cannot be read: {error!r:.200}") from error


def piece_names(program: Plan) -> dict[str, str]:
    """A name for each piece, in the order in which they first run."""
    names: dict[str, str] = {}
    for function, rows in _functions(program).items():
        found = [key for key in _calls(rows) if key not in names]
        for number, key in enumerate(found, 1):
            names[key] = function if len(found) == 1 else f"{function} {number}"
    return names


def _explain(
    name: str, program: Plan, counts: receipt.Receipt, pictures: graph_receipt.GraphReceipt
) -> Explanation:
    names = piece_names(program)
    functions = _functions(program)
    calls: Counter[str] = Counter()
    for rows in functions.values():
        calls.update(_calls(rows))
    forward = Counter(_calls(program.forward))
    pieces = [
        PieceView(
            name=label,
            hash=key,
            calls=calls[key],
            inputs=_inputs(program, key, names, pictures),
            outputs=_outputs(pictures, key),
            ranges={
                token_range: RangeView(passes, pictures.pieces[key][token_range])
                for token_range, passes in counts.pieces[key].items()
            },
        )
        for key, label in names.items()
    ]
    return Explanation(
        entry=name,
        layers=sum(not isinstance(row, PieceCall) for row in program.forward.rows),
        layer=names[forward.most_common(1)[0][0]] if forward else "",
        functions=[
            FunctionPasses(function, passes)
            for function, passes in zip(functions, counts.graph, strict=False)
        ],
        pieces=pieces,
        misses=[
            msgspec.structs.replace(each, piece=names.get(each.piece or "", FUNCTION))
            for each in pictures.misses
        ],
        seconds=counts.seconds,
    )


def _functions(program: Plan) -> dict[str, FunctionPlan]:
    return {"embed": program.embed, "forward": program.forward, "head": program.head}


def _calls(function: FunctionPlan) -> dict[str, int]:
    """Pieces in the order in which they first run, and how often each does."""
    return Counter(row.piece for row in function.rows if isinstance(row, PieceCall))


def _inputs(
    program: Plan, key: str, names: dict[str, str], pictures: graph_receipt.GraphReceipt
) -> list[InputView]:
    """What the first call of a piece is given."""
    for function in _functions(program).values():
        for row in function.rows:
            if isinstance(row, PieceCall) and row.piece == key:
                sources = [_source(arg, function, names) for arg in row.args]
                values = [op.value for op in _any(pictures, key).before if op.op == "input"]
                return [
                    InputView(*pair)
                    for pair in itertools.zip_longest(sources, values, fillvalue="")
                ]
    return []


def _source(arg: Argument, function: FunctionPlan, names: dict[str, str]) -> str:
    if isinstance(arg, Weight):
        return arg.path
    if isinstance(arg, Input):
        return f"input {arg.index} of the function"
    if isinstance(arg, Tokens):
        return "the token count"
    if isinstance(arg, plan.Value):
        row = function.rows[arg.row]
        if isinstance(row, PieceCall):
            return f"result {arg.output} of {names[row.piece]}"
        return f"result of {row.op.rpartition(':')[2]}"
    return str(arg.value)


def _outputs(pictures: graph_receipt.GraphReceipt, key: str) -> list[str]:
    before = _any(pictures, key).before
    values = {op.name: op.value for op in before}
    return [values[name] for op in before if op.op == "output" for name in op.inputs]


def _any(pictures: graph_receipt.GraphReceipt, key: str) -> PieceReceipt:
    return next(iter(pictures.pieces[key].values()))
