"""What is generated of the values that a schema allows: numbers that end, and the properties that
it lists.

JSON's numbers have no last digit, and a model that has begun one may go on until it is cut. Where a
schema that says nothing of further properties holds a call, a model would invent some, as servers
with strict grammars (xgrammar's default) and OpenAI's strict mode do not let it.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    together of one value is left as it is: each would forbid what the others ask for.
    """
    every = list(_all_parts(schema))
    joined = _joined(every, schema)
    for part in every:
        if id(part) not in joined:
            _bound_numbers(part)
            if closes:
                _close(part)


def _all_parts(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack += [inner for _, inner in parts_of(part)]


def _joined(every: list[dict[str, Any]], root: dict[str, Any]) -> set[int]:
    """The ids of schemas that hold of a value together with others."""
    found: set[int] = set()
    stack: list[Any] = [part for part in every if _num_voices(part) > 1]
    while stack:
        part = stack.pop()
        if isinstance(part, dict) and id(part) not in found:
            found.add(id(part))
            stack += [each for key in _BRANCHES for each in _entries(part, key)]
            if isinstance(pointer := part.get("$ref"), str):
                stack.append(resolve(root, pointer))
    return found


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
