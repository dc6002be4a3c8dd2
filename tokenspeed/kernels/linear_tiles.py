"""Which kernel, and how it cuts its work, for which linear layer on CUDA: a table, measured or
assumed.

The key is what is computed, the weight's shape and dtype, and how many tokens there are. A table
says what is fast, never what is right: any choice gives the same result but for float rounding, and
one table always makes the same choice.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch

_DEFAULT = Path(__file__).with_name("linear_tiles_h200.json")
MAX_TOKENS = 1 << 16
_MAX_SIZE = 1 << 31
_MAX_SPLITS = 64
_SHARED_BYTES = 226 << 10
"""Of a multiprocessor of Hopper, for data of 16 bits."""

ALGORITHM_BYTES = 64
"""Of a cublasLtMatmulAlgo_t."""


class Site(NamedTuple):
    """Where a linear layer stands: its kind, its weight [num_rows, size], and the dtype's name."""

    kind: str
    num_rows: int
    size: int
    dtype: str


class Tile(msgspec.Struct, frozen=True, omit_defaults=True, tag="tile", tag_field="by"):
    """How a kernel cuts its work. `rows` of w and `size` of their columns are read at a time.

    A program of `gemv` has one token, and `repeats` times as many rows. One of `skinny` has up to
    `tokens`, `splits` of them share the columns, and `stages` reads are under way. One of `gated`
    has `rows` pairs of rows, and goes on to other tiles.
    """

    kernel: Literal["gemv", "skinny", "gated"]
    rows: int
    warps: int
    size: int
    repeats: int = 1
    tokens: int = 16
    splits: int = 1
    stages: int = 3

    def problem(self) -> str | None:
        """Why no kernel can be launched so, or None."""
        for name, most in (("rows", 256), ("warps", 16), ("size", 8192), ("tokens", 256)):
            value = getattr(self, name)
            if not 1 <= value <= most or value & (value - 1):
                return f"{name} is {value}, not a power of two up to {most}"
        if not 1 <= self.splits <= _MAX_SPLITS or not 1 <= self.stages <= 8:
            return f"{self.splits} splits, {self.stages} stages"
        if not 1 <= self.repeats <= 64:
            return f"{self.repeats} repeats"
        if self.kernel == "skinny" and min(self.rows, self.size, self.tokens) < 16:
            return "a skinny tile is at least 16 wide"
        return self._gated_problem() if self.kernel == "gated" else None

    def _gated_problem(self) -> str | None:
        """Half of the tokens are 64 rows of the matrix unit or more, `size` is what it swizzles,
        and a thread has registers for 128 sums.
        """
        if self.tokens < 128 or self.rows < 16 or (self.warps, self.size) != (8, 64):
            return "a gated tile has 128 tokens, 16 rows, 8 warps and 64 columns or more"
        if self.tokens * self.rows > 1 << 14:
            return f"{self.tokens} x {self.rows} sums do not fit into registers"
        ring = self.stages * (self.tokens + 2 * self.rows) * self.size
        if 2 * (ring + self.tokens * self.rows) > _SHARED_BYTES:
            return f"{self.stages} stages do not fit into shared memory"
        return None


class Algorithm(msgspec.Struct, frozen=True, tag="cublaslt", tag_field="by"):
    """The library's product by an algorithm of cuBLASLt: its bytes in hexadecimal, and the version
    of the library that knows them.
    """

    data: str
    version: int

    @property
    def bytes(self) -> bytes:
        return bytes.fromhex(self.data)

    def problem(self) -> str | None:
        """Why this can be none, or None."""
        if not re.fullmatch(f"[0-9a-f]{{{2 * ALGORITHM_BYTES}}}", self.data):
            return "an algorithm of cuBLASLt is not 64 bytes in hexadecimal"
        return None


Way = Tile | Algorithm | None
"""None: as torch asks the library."""


class Choice(msgspec.Struct, frozen=True):
    """Up to `max_tokens` tokens, and above the choice before, this way."""

    max_tokens: int
    way: Way


class Entry(msgspec.Struct, frozen=True):
    kind: str
    num_rows: int
    size: int
    dtype: str
    choices: tuple[Choice, ...]

    @property
    def site(self) -> Site:
        return Site(self.kind, self.num_rows, self.size, self.dtype)


class TileTable(msgspec.Struct, frozen=True):
    """Entries, and the machine that they were measured on."""

    machine: str
    entries: tuple[Entry, ...]

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> TileTable:
        """ValueError, in one line, if this is no table."""
        table = msgspec.json.decode(data, type=cls)
        for entry in table.entries:
            limits = [choice.max_tokens for choice in entry.choices]
            if limits != sorted(set(limits)) or not all(0 < n <= MAX_TOKENS for n in limits):
                raise ValueError(f"tile table: token limits {limits} do not ascend")
            if not 0 < entry.num_rows < _MAX_SIZE or not 0 < entry.size < _MAX_SIZE:
                raise ValueError(f"tile table: a weight of {entry.num_rows} x {entry.size}")
            for choice in entry.choices:
                if choice.way and (problem := choice.way.problem()):
                    raise ValueError(f"tile table: {problem}")
        return table


_installed: dict[Site, tuple[Choice, ...]] = {}
"""For all models of the process: what is fast on this machine."""

_asked: dict[Site, tuple[Choice, ...]] = {}
"""What has been looked up."""


@functools.cache
def default_table() -> TileTable:
    return TileTable.from_json(_DEFAULT.read_bytes())


def install(entries: Iterable[Entry]) -> None:
    """Choose by these entries from now on, in this process, where a site has none yet: a model that
    runs goes on to the last bit when another one is loaded.
    """
    for entry in entries:
        _installed.setdefault(entry.site, entry.choices)
    choices_of.cache_clear()


def uninstall() -> None:
    """Back to what is assumed."""
    _installed.clear()
    choices_of.cache_clear()


@functools.cache
def choices_of(kind: str, num_rows: int, size: int, dtype: torch.dtype) -> tuple[Choice, ...]:
    """The choices for a site: installed, or measured beforehand, or by a rule."""
    site = Site(kind, num_rows, size, str(dtype).removeprefix("torch."))
    entries = default_table().entries
    measured = next((entry.choices for entry in entries if entry.site == site), None)
    choices = _installed.get(site, measured)
    _asked[site] = _assumed(site) if choices is None else choices
    return _asked[site]


def token_limits() -> set[int]:
    """The token counts up to which one choice holds and behind which the next begins, of all sites
    that were asked for, where one of the two is a kernel that Triton compiles.
    """
    found = set()
    for choices in _asked.values():
        for choice, following in itertools.zip_longest(choices, choices[1:]):
            if any(each and isinstance(each.way, Tile) for each in (choice, following)):
                found.add(choice.max_tokens)
    return found


def way_for(kind: str, num_rows: int, size: int, dtype: torch.dtype, num_tokens: int) -> Way:
    """What a site's choices say of a token count; beyond them torch's way is as fast."""
    for choice in choices_of(kind, num_rows, size, dtype):
        if num_tokens <= choice.max_tokens:
            return choice.way
    return None


def _assumed(site: Site) -> tuple[Choice, ...]:
    """What holds for all shapes that were measured: one token is `gemv`'s."""
    if site.size > 4096:
        return () if site.kind.startswith("norm") else (Choice(1, Tile("gemv", 2, 4, size=1024)),)
    return (Choice(1, Tile("gemv", rows=1 if site.size > 1024 else 2, warps=4, size=4096)),)
