"""Token ranges: a piece is compiled once for each, and the real token count picks at run time.

On a CPU one range is enough. On CUDA the best kernels for a handful of tokens are not those for a
prefill, so there are two. They meet where the benchmark of linear layers says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.compile.plan import Piece
from tokenspeed.passes.rewrite import EVERY, FEW, MANY, TokenRange


class TokenArgument(msgspec.Struct, frozen=True):
    """Where a piece finds the token count: an argument is it (`is_count`), or has it in front."""

    index: int
    is_count: bool


def token_ranges(device: str) -> tuple[TokenRange, ...]:
    """The ranges for a device type, in order; together they hold every token count."""
    return (FEW, MANY) if device == "cuda" else (EVERY,)


def range_name(token_range: TokenRange) -> str:
    """`all`, `0-32` or `33-`: part of file names."""
    if token_range == EVERY:
        return "all"
    last = "" if token_range.last is None else token_range.last
    return f"{token_range.first}-{last}"


def by_tokens(pieces: Mapping[TokenRange, Piece], where: TokenArgument | None) -> Piece:
    """One piece out of those for each range. `where` is None for what knows no token count."""
    ordered = sorted(pieces.items())
    if where is None or len(ordered) == 1:
        return ordered[-1][1]
    (token_range, few), (_, many) = ordered
    index, last = where.index, token_range.last
    assert last is not None

    def pick_by_count(*args: Any) -> tuple[Any, ...]:
        return few(*args) if args[index] <= last else many(*args)

    def pick_by_size(*args: Any) -> tuple[Any, ...]:
        return few(*args) if len(args[index]) <= last else many(*args)

    return pick_by_count if where.is_count else pick_by_size
