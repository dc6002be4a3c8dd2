"""The receipt of graphs: each piece before and after the passes, the kernels that it became, and
how near passes came that did not match. Written when an entry is made (`pictures.py`), and only
read later.

It holds what people want to see, not what could be run: ops and operands as text, shapes with T for
the token count, and places in the model's source.
"""

from __future__ import annotations

import msgspec

from tokenspeed.passes.rewrite import Miss


class Op(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node: `inputs` are the names of those it reads, `args` its plain arguments as text, `value`
    what it computes. `moves`: it reads and writes memory, were it a kernel of its own. `replaced`:
    the nodes of the graph before the passes that it stands for, if it came in their place.
    """

    name: str
    op: str
    inputs: tuple[str, ...] = ()
    args: tuple[str, ...] = ()
    value: str = ""
    sources: tuple[str, ...] = ()
    moves: bool = False
    replaced: tuple[str, ...] = ()


class Kernel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A launch, in order: `ops` are nodes of the graph after the passes."""

    name: str
    ops: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()


class PieceReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece for one token range. Empty where the compiler had compiled an equal graph before:
    what is to be told was told there.
    """

    before: tuple[Op, ...] = ()
    after: tuple[Op, ...] = ()
    kernels: tuple[Kernel, ...] = ()


class PieceMiss(msgspec.Struct, frozen=True):
    """Where a pass came nearest, and did not match. No piece: in a whole function."""

    rule: str
    piece: str | None
    token_range: str
    miss: Miss


class GraphReceipt(msgspec.Struct):
    """`pieces` by hash and token range."""

    pieces: dict[str, dict[str, PieceReceipt]] = {}
    misses: list[PieceMiss] = []


def encode(graphs: GraphReceipt) -> bytes:
    return msgspec.json.encode(graphs)


def decode(data: bytes) -> GraphReceipt:
    """Raises msgspec.DecodeError for anything that `encode` did not write."""
    return msgspec.json.decode(data, type=GraphReceipt)
