"""Reading a checkpoint's `config.json`: every field is typed and bounded, and an error names it.

A field that is absent or null takes its default; without a default it is required. NaN fails every
bound, and true or false is not a number here, although Python says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.text.errors import ModelError


class Fields:
    """The fields of one JSON object. `where` says in errors which object that is."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def count(self, name: str, default: int | None = None, *, low: int = 1, high: int) -> int:
        """A whole number from `low` to `high`."""
        value = self._get(name, default)
        if type(value) is not int or not low <= value <= high:
            raise self.error(
                name, f"must be a whole number from {low} to {high}, got {value!r:.60}"
            )
        return value

    def number(self, name: str, default: float | None = None, *, low: float, high: float) -> float:
        """A number from `low` to `high`."""
        return self._number(name, self._get(name, default), low, high)

    def numbers(self, name: str, length: int, *, low: float, high: float) -> list[float]:
        """A list of exactly `length` numbers, each from `low` to `high`."""
        values = self._get(name, None)
        if not isinstance(values, list) or len(values) != length:
            raise self.error(name, f"must be a list of {length} numbers")
        return [self._number(name, value, low, high) for value in values]

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if type(value) is not bool:
            raise self.error(name, f"must be true or false, got {value!r:.60}")
        return value

    def require(self, name: str, expected: Any) -> None:
        """Refuse any value but `expected` (or an absent or null one): nothing else is built."""
        value = self._get(name, expected)
        if value != expected or type(value) is not type(expected):
            raise self.error(name, f"{value!r:.60} is not supported, only {expected!r} is")

    def sizes(self) -> dict[str, int]:
        """What every decoder's config says of its shape, under our names."""
        hidden_size = self.count("hidden_size", high=1 << 20)
        num_heads = self.count("num_attention_heads", high=1 << 12)
        num_kv_heads = self.count("num_key_value_heads", num_heads, high=num_heads)
        if num_heads % num_kv_heads:
            raise self.error("num_key_value_heads", f"({num_kv_heads}) must divide {num_heads}")
        return {
            "vocab_size": self.count("vocab_size", high=1 << 24),
            "hidden_size": hidden_size,
            "intermediate_size": self.count("intermediate_size", high=1 << 20),
            "num_layers": self.count("num_hidden_layers", high=1 << 10),
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": self.count("head_dim", hidden_size // num_heads, high=1 << 12),
        }

    def error(self, name: str, what: str) -> ModelError:
        return ModelError(f"{self.where}: {name} {what}")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "is missing")
        return value

    def _number(self, name: str, value: Any, low: float, high: float) -> float:
        if type(value) not in (int, float) or not low <= value <= high:
            raise self.error(name, f"must be a number from {low:g} to {high:g}, got {value!r:.60}")
        return float(value)
