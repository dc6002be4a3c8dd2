"""Token ranges: a piece is compiled once for each, and the real token count picks at run time.

On a CPU one range is enough. On CUDA the best kernels for a handful of tokens are not those for a
prefill, so there are two: up to the largest decode step, and above.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from tokenspeed.compile.plan import Piece
from tokenspeed.passes.rewrite import EVERY, TokenRange

_DECODE_TOKENS = 256
"""The largest decode step that kernels are chosen for, unless steps may be larger."""


class TokenArgument(msgspec.Struct, frozen=True):
    """Where a piece finds the token count: an argument is it (`is_count`), or has it in front."""

    index: int
    is_count: bool


def token_ranges(device: str, max_num_seqs: int) -> tuple[TokenRange, ...]:
    """The ranges for a device type, in order; together they hold every token count. A power of two
    bounds the first, so that a few sequences more do not make another cache entry.
    """
    if device != "cuda":
        return (EVERY,)
    last = max(_DECODE_TOKENS, 1 << (max_num_seqs - 1).bit_length())
    return TokenRange(0, last), TokenRange(last + 1, None)


def range_name(token_range: TokenRange) -> str:
    """`all`, `0-256` or `257-`: part of file names."""
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
