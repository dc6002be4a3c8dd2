"""JSON schemas before they are compiled: how large and deep they are, and where one is wrong.

The grammar engine compiles by recursion, also through references, and tells what is wrong but not
where. Its own errors are kept; the place is found by asking it about ever smaller parts. Two things
that it takes but cannot hold are mended or refused here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import msgspec

from tokenspeed.request import InvalidRequest

MAX_DEPTH = 100
"""Levels of JSON."""
MAX_CHAIN = 1000
"""Schemas nested in each other where references are followed."""
MAX_QUESTIONS = 300
"""Parts that are tried in the search for the one that is wrong."""

MAX_PATTERNS = 64
"""Of the names of one object: each is compared with each."""
MAX_PATTERN_NAMES = 4096
"""Pairs of a pattern and a name beside it: each is tried."""

_MAX_REMAINDERS = 10_000
"""That many take no time; a hundred times as many, minutes and gigabytes."""

_ONE = ("items", "additionalProperties", "additionalItems", "not", "if", "then", "else")
_LIST = ("anyOf", "oneOf", "allOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


def parse_schema(text: str) -> Any:
    """The schema in `text`, within bounds. Raises InvalidRequest."""
    try:
        schema = msgspec.json.decode(text)
    except RecursionError:
        raise InvalidRequest("the JSON schema is nested too deeply") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the JSON schema is not JSON: {error}") from None
    if isinstance(schema, bool):
        return {} if schema else {"anyOf": []}
    if not isinstance(schema, dict):
        raise InvalidRequest(f"a JSON schema is an object or a boolean, not {text.strip():.40}")
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequest(f"the JSON schema has more than {MAX_DEPTH} levels")
    if _Chain(schema).length() > MAX_CHAIN:
        raise InvalidRequest(
            f"references nest the JSON schema more than {MAX_CHAIN} schemas deep; flatten it"
        )
    return schema


def locate(schema: Any, error: str, ask: Callable[[Any], str]) -> tuple[str, str]:
    """The path of the smallest part for which `ask` (a schema's error, "" without one) says
    `error` too, or that cannot be satisfied if that is what `error` says; and its error. "$" is the
    whole.
    """
    path, questions = "$", 0
    definitions = {name: schema[name] for name in _DEFINITIONS if name in schema}
    found = True
    while found:
        found = False
        for step, part in parts_of(schema):
            questions += 1
            if questions > MAX_QUESTIONS or not isinstance(part, dict):
                break
            # References to definitions keep their meaning; others are not followed into.
            reason = ask({**definitions, **part})
            if reason == error or reason[:_ENOUGH] == error[:_ENOUGH] == _UNSATISFIABLE:
                path, schema, error, found = path + step, part, reason, True
                break
    return path, error


_UNSATISFIABLE = "Unsatisfiable schema"
_ENOUGH = len(_UNSATISFIABLE)


def mend(
    schema: Any, is_dead: Callable[[list[str], str], bool], path: str = "$", root: Any = None
) -> Any:
    """The schema without what would let an output begin that cannot end. Raises InvalidRequest for
    what cannot be held.

    `is_dead(names, pattern)`: does a pattern match no name beside `names`? The grammar engine
    would offer a further property, and no name for it. `root` is what references are into; the
    schema itself without one.
    """
    if not isinstance(schema, dict):
        return schema
    root = schema if root is None else root
    whole = dict(schema)
    _check_patterns(schema, path)
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            whole[key] = {
                name: mend(part, is_dead, f"{path}.{key}.{name}", root)
                for name, part in named.items()
            }
    for key in _LIST:
        if isinstance(several := schema.get(key), list):
            parts = enumerate(several)
            whole[key] = [
                mend(part, is_dead, f"{path}.{key}[{index}]", root) for index, part in parts
            ]
    for key in _ONE:
        if isinstance(schema.get(key), dict):
            whole[key] = mend(schema[key], is_dead, f"{path}.{key}", root)
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    if isinstance(names, dict) and names and isinstance(patterns, dict):
        kept = {key: whole["patternProperties"][key] for key in patterns}
        whole["patternProperties"] = {
            key: part for key, part in kept.items() if not is_dead([*names], key)
        }
    _check_count(schema, path)
    _check_multiple(schema, path, root)
    return whole


def _check_patterns(schema: dict[str, Any], path: str) -> None:
    names, patterns = schema.get("properties"), schema.get("patternProperties")
    if not isinstance(patterns, dict):
        return
    pairs = len(patterns) * len(names) if isinstance(names, dict) else 0
    if len(patterns) > MAX_PATTERNS or pairs > MAX_PATTERN_NAMES:
        beside = f" beside {len(names)} properties" if isinstance(names, dict) else ""
        raise InvalidRequest(
            f"the JSON schema cannot be used, at {path[:200]}: {len(patterns)} patternProperties"
            f"{beside} are too many to compare; at most {MAX_PATTERNS} are taken, and "
            f"{MAX_PATTERN_NAMES} pairs with a property"
        )


def _check_count(schema: dict[str, Any], path: str) -> None:
    """A name may be written twice, so the number of names cannot be held if they are free."""
    least, required = schema.get("minProperties"), schema.get("required")
    if not isinstance(least, int) or schema.get("additionalProperties") is False:
        if not schema.get("patternProperties"):
            return
    known = len(set(map(str, required))) if isinstance(required, list) else 0
    if isinstance(least, int) and least > known:
        raise InvalidRequest(
            f"the JSON schema cannot be used, at {path[:200]}: minProperties {least} cannot be "
            "held where names are free; name the properties in `required`"
        )


def _check_multiple(schema: dict[str, Any], path: str, root: Any) -> None:
    """The automaton of a multiple has a state for each remainder: of all that hold at once, for the
    product of them.
    """
    states = 1
    for part in _together(schema, root):
        divisor = part.get("multipleOf")
        if isinstance(divisor, int | float) and math.isfinite(divisor):
            states *= max(1, abs(int(Decimal(str(divisor)).scaleb(_decimals(divisor)))))
    if states > _MAX_REMAINDERS:
        raise InvalidRequest(
            f"the JSON schema cannot be used, at {path[:200]}: multipleOf has {states:.3g} "
            f"remainders to tell apart, and {_MAX_REMAINDERS} can be; take a smaller one"
        )


def _together(schema: dict[str, Any], root: Any) -> Iterator[dict[str, Any]]:
    """The schemas that hold of whatever `schema` holds of, through `allOf` and references."""
    seen: set[int] = set()
    stack: list[Any] = [schema]
    while stack:
        part = stack.pop()
        if not isinstance(part, dict) or id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        several = part.get("allOf")
        stack += several if isinstance(several, list) else []
        if isinstance(pointer := part.get("$ref"), str):
            stack.append(resolve(root, pointer))


def _decimals(number: float) -> int:
    """Digits behind the point."""
    exponent = Decimal(str(number)).normalize().as_tuple().exponent
    return max(0, -exponent) if isinstance(exponent, int) else 0


def parts_of(schema: Any) -> Iterator[tuple[str, Any]]:
    """The schemas that stand directly in a schema, each with its step of a path."""
    if not isinstance(schema, dict):
        return
    for key in _NAMED:
        if isinstance(named := schema.get(key), dict):
            yield from ((f".{key}.{name}", part) for name, part in named.items())
    for key in _LIST:
        if isinstance(several := schema.get(key), list):
            yield from ((f".{key}[{index}]", part) for index, part in enumerate(several))
    for key in _ONE:
        if isinstance(schema.get(key), dict | bool):
            yield f".{key}", schema[key]


def _depth(value: Any) -> int:
    """Levels of objects and lists, without recursion."""
    depth, level = 0, [value]
    while level := [each for each in level if isinstance(each, dict | list)]:
        depth += 1
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each
        level = inner
    return depth


class _Chain:
    """The longest way down through parts and references; a reference back to where one comes from
    ends it.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, int] = {}
        self._open: set[int] = set()

    def length(self) -> int:
        """Depth first with a stack of its own: what is measured here would end Python's."""
        stack: list[tuple[Any, bool]] = [(self._root, False)]
        while stack:
            schema, is_done = stack.pop()
            key = id(schema)
            parts = [part for part in self._below(schema) if isinstance(part, dict)]
            if is_done:
                self._open.discard(key)
                lengths = [self._known.get(id(part), 0) for part in parts]
                self._known[key] = 1 + max(lengths, default=0)
            elif key not in self._known and key not in self._open:
                self._open.add(key)
                stack.append((schema, True))
                stack += [(part, False) for part in parts]
        return self._known[id(self._root)]

    def _below(self, schema: Any) -> Iterator[Any]:
        yield from (part for _, part in parts_of(schema))
        if isinstance(schema, dict) and isinstance(pointer := schema.get("$ref"), str):
            yield resolve(self._root, pointer)


def resolve(root: Any, pointer: str) -> Any:
    """The target of a reference into a schema; None for any other."""
    here = root
    if pointer != "#" and not pointer.startswith("#/"):
        return None
    for step in pointer.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict):
            here = here.get(step)
        elif isinstance(here, list) and step.isdecimal() and len(step) < 7:
            here = here[int(step)] if int(step) < len(here) else None
        else:
            return None
    return here
