"""Words that messages to people share."""

from __future__ import annotations

import re

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}
_COMPARED = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than", "==": "exactly"}

_KIND = re.compile(r"Expected `([^`]+)`, got `([^`]+)`")
_SIZE = re.compile(r"Expected `(\w+)` of length (\S+) (\d+)")
_BOUND = re.compile(r"Expected `\w+` (>=|<=|>|<) (\S+)")
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(.+)`")


def counted(count: int, noun: str) -> str:
    """`1 request`, `2 requests`; `noun` in the singular, of those that take an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def type_error(message: str, name: str = "") -> str:
    """What msgspec's `message` about a value means to whoever sent it; `name` is what the value is
    called. ("Expected `int`, got `str` - at `$[0]`": ids[0] must be a whole number, not text.)
    """
    what, _, path = message.partition(" - at ")
    inside = path.strip("`").removeprefix("$").removesuffix("[...]")
    place = name + inside if name else inside.removeprefix(".")
    if found := _KIND.fullmatch(what):
        kinds = " or ".join(_KINDS.get(each, each) for each in found[1].split(" | "))
        return f"{place or 'it'} must be {kinds}, not {_KINDS.get(found[2], found[2])}"
    if found := _SIZE.fullmatch(what):
        noun = "character" if found[1] == "str" else "entry" if found[3] == "1" else "entrie"
        return f"{place or 'it'} must have {_COMPARED[found[2]]} {counted(int(found[3]), noun)}"
    if found := _BOUND.fullmatch(what):
        return f"{place or 'it'} must be {_COMPARED[found[1]]} {found[2]}"
    where = f"{place}: " if place else ""
    if found := _MISSING.fullmatch(what):
        return f"{where}{found[1]} is missing"
    if found := _UNKNOWN.fullmatch(what):
        return f"{where}{found[1]} is not a known field"
    return f"{where}{what}"
