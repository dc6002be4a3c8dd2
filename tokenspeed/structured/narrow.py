"""What is generated of the values that a schema allows: numbers that end, and the properties that
it lists.

JSON's numbers have no last digit, and a model that has begun one may go on until it is cut. Where a
schema that says nothing of further properties holds a call, a model would invent some, as servers
with strict grammars (xgrammar's default) and OpenAI's strict mode do not let it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tokenspeed.structured.schema import parts_of, resolve

MAX_NUMBER = 9 * 10**18
"""What 64 bits hold: at most 19 digits before the point."""
MIN_DECIMAL = 1e-9
"""At most nine digits behind it."""
_LEAST_SPAN = 1e-6
"""Between bounds that are nearer, numbers keep all their digits."""

_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_FREE_NAMES = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_SILENT = {
    *("$schema", "$id", "$comment", "$defs", "definitions", "title", "description", "default"),
    *("examples", "deprecated", "readOnly", "writeOnly"),
}
"""Keys that ask nothing of a value."""
_BRANCHES = ("allOf", "anyOf", "oneOf")


def narrow(schema: dict[str, Any], *, closes: bool) -> None:
    """Narrow a schema in place; with `closes`, to listed properties too. What several schemas say
    together of one value is left as it is, and is not closed below either, where they may speak of
    the same properties: each would forbid what the others ask for.
    """

    def with_branches(part: dict[str, Any]) -> Iterator[Any]:
        """What holds of the same value."""
        yield from (each for key in _BRANCHES for each in _entries(part, key))
        if isinstance(pointer := part.get("$ref"), str):
            yield resolve(schema, pointer)

    def with_all(part: dict[str, Any]) -> Iterator[Any]:
        yield from _inside(part)
        yield from with_branches(part)

    every = _reached([schema], _inside)
    shared = [each for part in every for each in _shared(part)]
    joined = _reached(shared, with_branches)
    is_joined, is_open = (set(map(id, each)) for each in (joined, _reached(joined, with_all)))
    for part in every:
        if id(part) not in is_joined:
            _bound_numbers(part)
        if closes and id(part) not in is_open:
            _close(part)


def _reached(
    parts: Iterable[Any], onward: Callable[[dict[str, Any]], Iterable[Any]]
) -> list[dict[str, Any]]:
    """The schemas among `parts`, and those that lead on from them, each once."""
    found: dict[int, dict[str, Any]] = {}
    stack = list(parts)
    while stack:
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in found:
            found[id(part)] = part
            stack += onward(part)
    return list(found.values())


def _inside(part: dict[str, Any]) -> Iterator[Any]:
    return (inner for _, inner in parts_of(part))


def _shared(part: dict[str, Any]) -> Iterator[Any]:
    """Itself, if others hold of its value too; its properties, where patterns name them as well."""
    if _num_voices(part) > 1:
        yield part
    if all(isinstance(part.get(key), dict) for key in ("properties", "patternProperties")):
        yield from part["properties"].values()
        yield from part["patternProperties"].values()


def _num_voices(part: dict[str, Any]) -> int:
    """How many schemas say something of a value that `part` holds of: itself, each of `allOf`, a
    reference, and one of each choice.
    """
    has_own = any(key not in _SILENT and key not in (*_BRANCHES, "$ref") for key in part)
    choices = ("anyOf" in part) + ("oneOf" in part)
    return has_own + ("$ref" in part) + choices + len(_entries(part, "allOf"))


def _entries(part: dict[str, Any], key: str) -> list[Any]:
    several = part.get(key)
    return several if isinstance(several, list) else []


def _bound_numbers(part: dict[str, Any]) -> None:
    if "enum" in part or "const" in part:
        return
    kinds = part.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    given = [part[key] for key in _BOUNDS if key in part]
    if not {"integer", "number"} & {kind for kind in kinds if isinstance(kind, str)} or not all(
        type(bound) in (int, float) for bound in given
    ):
        return
    low = max((part[key] for key in _BOUNDS[:2] if key in part), default=-MAX_NUMBER)
    high = min((part[key] for key in _BOUNDS[2:] if key in part), default=MAX_NUMBER)
    if not low < high:
        return
    if not any(key in part for key in _BOUNDS[:2]):
        part["minimum"] = low
    if not any(key in part for key in _BOUNDS[2:]):
        part["maximum"] = high
    if "number" in kinds and high - low >= _LEAST_SPAN:
        part.setdefault("multipleOf", MIN_DECIMAL)


def _close(part: dict[str, Any]) -> None:
    names, required, least = part.get("properties"), part.get("required"), part.get("minProperties")
    if not isinstance(names, dict) or any(key in part for key in _FREE_NAMES):
        return
    asks_for_more = isinstance(required, list) and not all(
        isinstance(name, str) and name in names for name in required
    )
    if not asks_for_more and not (isinstance(least, int) and least > len(names)):
        part["additionalProperties"] = False
