"""Token ranges: a piece is compiled once for each, and the real token count picks at run time.

Where they end is a setting (`--compile-ranges`), and `resolve` has its defaults.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Any

from tokenspeed.compile.plan import Piece, TokenArgument
from tokenspeed.passes.rewrite import EVERY, TokenRange


def token_ranges(ends: Sequence[int]) -> tuple[TokenRange, ...]:
    """The ranges that end at these ascending token counts, and the one above; together they hold
    every token count. An end of 0 makes no range of its own.
    """
    lasts = [end for end in ends if end > 0]
    firsts = [0, *(last + 1 for last in lasts)]
    return tuple(map(TokenRange, firsts, [*lasts, None]))


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
    index = where.index
    lasts = [each.last for each, _ in ordered[:-1] if each.last is not None]
    ranged = [piece for _, piece in ordered]

    def pick_by_count(*args: Any) -> tuple[Any, ...]:
        return ranged[bisect_left(lasts, args[index])](*args)

    def pick_by_size(*args: Any) -> tuple[Any, ...]:
        return ranged[bisect_left(lasts, len(args[index]))](*args)

    return pick_by_count if where.is_count else pick_by_size
