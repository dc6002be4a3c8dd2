"""Dotted module paths with numbers: `layers.3.mlp` is the pattern `layers.*.mlp` and ["3"]."""

from __future__ import annotations

from collections.abc import Mapping


def split_numbers(path: str) -> tuple[str, list[str]]:
    """A path's pattern, and the numbers that its stars stand for."""
    parts = path.split(".")
    pattern = ".".join("*" if part.isdecimal() else part for part in parts)
    return pattern, [part for part in parts if part.isdecimal()]


def fill_numbers(pattern: str, numbers: list[str]) -> str:
    """The path that a pattern names for these numbers: the inverse of `split_numbers`."""
    for number in numbers:
        pattern = pattern.replace("*", number, 1)
    return pattern


def rename(name: str, table: Mapping[str, str]) -> str:
    """Look a tensor's module up in `table` (pattern -> pattern); its last name stays, and a name
    that the table does not know stays whole.
    """
    module, _, leaf = name.rpartition(".")
    pattern, numbers = split_numbers(module)
    return f"{fill_numbers(table[pattern], numbers)}.{leaf}" if pattern in table else name
