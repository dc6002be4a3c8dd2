"""Small schemas, and what holds under them: the oracle, which knows no grammar."""

from __future__ import annotations

import re
from typing import Any

from hypothesis import strategies as st

SCALARS = st.one_of(
    st.just({"type": "null"}),
    st.just({"type": "boolean"}),
    st.builds(
        lambda low, span: {"type": "integer", "minimum": low, "maximum": low + span},
        st.integers(-300, 300),
        st.integers(0, 2000),
    ),
    st.builds(
        lambda low, span: {"type": "string", "minLength": low, "maxLength": low + span},
        st.integers(0, 3),
        st.integers(0, 4),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.text("abc {", max_size=4), st.integers(-9, 9)), min_size=1),
    ),
    st.just({"type": "string", "pattern": "^[a-c]{2}1?$"}),
)


def _object(properties: dict[str, Any], required: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties)[:required],
        "additionalProperties": False,
    }


SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda items, low, span: {
                **{"type": "array", "items": items},
                **{"minItems": low, "maxItems": low + span},
            },
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.builds(
            _object,
            st.dictionaries(st.text("abé", min_size=1), inner, max_size=3),
            st.integers(0, 3),
        ),
        st.builds(lambda several: {"anyOf": several}, st.lists(inner, min_size=1, max_size=3)),
    ),
    max_leaves=6,
)


def holds(schema: Any, value: Any) -> bool:
    """The part of JSON Schema that `SCHEMAS` speaks, written down once more."""
    if "anyOf" in schema:
        return any(holds(each, value) for each in schema["anyOf"])
    if "enum" in schema:
        return any(type(each) is type(value) and each == value for each in schema["enum"])
    kind = schema["type"]
    if type(value) is not TYPES[kind]:
        return False
    if kind == "integer":
        return bool(schema["minimum"] <= value <= schema["maximum"])
    if kind == "string":
        is_long = schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 99)
        return is_long and bool(re.search(schema.get("pattern", ""), value))
    if kind == "array":
        is_long = schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_long and all(holds(schema["items"], each) for each in value)
    if kind == "object":
        known = schema["properties"]
        is_whole = set(schema["required"]) <= set(value) <= set(known)
        return is_whole and all(holds(known[key], each) for key, each in value.items())
    return True


TYPES = {
    **{"null": type(None), "boolean": bool, "integer": int},
    **{"string": str, "array": list, "object": dict},
}
