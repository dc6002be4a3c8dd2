"""Values that a model wrote as plain text, as JSON of the types that the tool's schema allows.

Text that is no value of an allowed type is a string: nothing is ever lost, and a string parameter
"123" stays one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from tokenspeed.text.unicode import is_unicode

_ANY = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_STRING = frozenset({"string"})
_MAX_DEPTH = 16
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}


def parameter_types(schema: Mapping[str, Any], name: str) -> frozenset[str]:
    """JSON types that the schema of a tool's arguments allows for one of them. A parameter that the
    schema does not name is a string.
    """
    properties = schema.get("properties")
    if not isinstance(properties, Mapping) or name not in properties:
        return _STRING
    return _types(properties[name], schema, 0) or _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Types that a schema names; none if it leaves them open."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return frozenset()
    declared = schema.get("type")
    if isinstance(declared, str):
        return _ANY & {declared}
    if isinstance(declared, list):
        return _ANY & {each for each in declared if isinstance(each, str)}
    values = schema["enum"] if isinstance(schema.get("enum"), list) else None
    if values is None and "const" in schema:
        values = [schema["const"]]
    if values:
        return frozenset().union(*map(_types_of, values))
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _types(_resolve(root, reference), root, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            found = [_types(branch, root, depth + 1) for branch in branches]
            if key == "allOf":
                return next((types for types in found if types), frozenset())
            return frozenset().union(*found) if all(found) else frozenset()
    return frozenset()


def _resolve(root: Mapping[str, Any], reference: str) -> Any:
    value: Any = root
    for part in reference[2:].split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _types_of(value: object) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"number"} | ({"integer"} if value.is_integer() else set()))
    if isinstance(value, str):
        return _STRING
    return frozenset({"array" if isinstance(value, list) else "object"})


def coerce(text: str, types: frozenset[str]) -> str:
    """The value as JSON, of one of `types` where the text is one, else a string."""
    stripped = text.strip()
    try:
        value = json.loads(
            _PYTHON_WORDS.get(stripped, stripped),
            parse_constant=_refuse,
            parse_float=finite,
        )
    except (ValueError, RecursionError):
        value = text
    if isinstance(value, str) or not _types_of(value) & types:
        value = text
    elif isinstance(value, float) and value.is_integer() and "number" not in types:
        value = int(value)
    written = json.dumps(value, ensure_ascii=False)
    # Half a surrogate pair has no UTF-8 and stays an escape.
    return written if is_unicode(written) else json.dumps(value)


def _refuse(name: str) -> None:
    raise ValueError(name)


def finite(digits: str) -> float:
    """ValueError for what no float holds."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(digits)
    return value
