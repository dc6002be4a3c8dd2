"""What is said between whoever serves grammars and their processes: typed msgpack, never pickle.

    server --Vocabulary--> zygote            in a file, once
    server --Open, Kill, Slow--> zygote      messages; Open comes with three files
    server --Job--> process                  of a grammar: in the first of these
    process --Verdict--> server              when the grammar has been compiled, or cannot be
    server --Ask--> process --Told--> server     one at a time; masks come by the third, the board

The board holds `ROWS` masks, row after row of `num_words` int32, behind `HEADER_BYTES` whose first
word says how many of the places that were asked for are done. Bit i % 32 of word i // 32 of a mask
says whether token i is allowed.
"""

from __future__ import annotations

import msgspec

from tokenspeed.constraint import StructuredOutputs

ROWS = 64
"""Masks that are asked for at once, at most."""
HEADER_BYTES = 64
LAST = 1.25
"""A process that is asked nothing ends by itself after so many times `keep_s`: later than it is
asked for the last time, so that no question meets its end.
"""


def num_words(vocab_size: int) -> int:
    """Of a packed mask."""
    return -(-vocab_size // 32)


class Vocabulary(msgspec.Struct, frozen=True, kw_only=True):
    """What a `TokenTable` is made from; `tokenizer` in the library's own form."""

    tokenizer: str
    special_tokens: dict[str, str]
    vocab_size: int
    eos_ids: list[int]


class Open(msgspec.Struct, tag="open", frozen=True, array_like=True):
    """Fork the process of a grammar: its connection, its job and its board come along."""

    number: int


class Kill(msgspec.Struct, tag="kill", frozen=True, array_like=True):
    number: int


class Slow(msgspec.Struct, tag="slow", frozen=True, array_like=True):
    """Let it run only when others leave it time."""

    number: int


ToZygote = Open | Kill | Slow


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """`keep_s`: for how long a process that is asked nothing may be asked again."""

    asked: StructuredOutputs
    any_whitespace: bool
    keep_s: float


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """`error` is "" where the grammar can be followed."""

    error: str


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A sequence, and the tokens it has taken since it was last asked about."""

    sequence: int
    tokens: list[int]
    reasoning_end: tuple[int, ...] = ()


class Ask(msgspec.Struct, frozen=True, array_like=True):
    """The masks of the next tokens of `places`. Sequences that have `ended` may be forgotten."""

    places: list[Place]
    ended: list[int] = []


class Told(msgspec.Struct, frozen=True, array_like=True):
    """Of each place: why it cannot go on, "" where it can, and the seconds it took."""

    errors: list[str]
    seconds: list[float]
