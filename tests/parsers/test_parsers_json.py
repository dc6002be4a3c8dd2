"""JSON that is checked while it comes, and plain text as values of a schema's types."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.parsers.coerce import coerce, parameter_types
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.json_text import MAX_DEPTH, json_value, mended
from tokenspeed.parsers.reader import Reader

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def streamed(pieces: list[str]) -> tuple[str, str, bool]:
    """What is passed on of one value, what is left of the text, and whether it was one."""
    reader, passed = Reader(), list[str]()
    steps = json_value(reader, passed.append, settles=True)
    is_whole = False
    try:
        for piece in pieces:
            reader.feed(piece)
            next(steps)
        reader.is_closed = True
        next(steps)
    except StopIteration:
        is_whole = True
    except Malformed:
        pass
    fed = "".join(pieces)
    return "".join(passed), fed[reader.num_settled :], is_whole


@settings(max_examples=60, deadline=None)
@given(VALUES, st.booleans(), st.sampled_from([None, 2]))
def test_json_passes_as_it_is(value: Any, is_ascii: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii, indent=indent)
    assert mended(text) == text
    assert streamed([*text, " "]) == streamed([text + " "]) == (text, " ", True)


@given(st.text('{}[]",:\\u0def1-+.eE trTunlN\n\u00e9', max_size=24))
def test_what_is_taken_is_json(text: str) -> None:
    """Python's own reader is the judge: it takes what passes; what it takes passes unchanged."""
    passed, _, is_whole = streamed([text])
    by_character = streamed(list(text))
    if is_whole:
        assert by_character[2] and by_character[0] == passed
        json.loads(passed)
    try:
        json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return
    assert mended(text) == text.rstrip(" \n")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ('"a\nb"', '"a\\nb"'),
        ('"\\d\\u12"', '"\\\\d\\\\u12"'),
        ("[True, False, None]", "[true, false, null]"),
        ("[" * MAX_DEPTH + "]" * MAX_DEPTH, "[" * MAX_DEPTH + "]" * MAX_DEPTH),
    ],
)
def test_slips_are_mended(text: str, meant: str) -> None:
    assert mended(text) == meant and json.loads(meant) is not None


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        *[(word[:3], word[:3].lower()) for word in ("True", "true", "false", "null")],
        *[(text, text) for text in ("-", "0", "-12", "1.", "1.5", "1e", "1.5E-", "1e+7")],
        *[(text, "") for text in ("foo", "Truth", "01", "1.e", "1e5.", "+1", "-a", "\u0661")],
        *[(text, text) for text in ('"a\\', '"\\u00')],
    ],
)
def test_of_a_word_that_is_cut_passes_what_json_may_begin_with(text: str, passed: str) -> None:
    assert streamed(['{"a": ', text]) == ('{"a": ' + passed, "", False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[1,]",
        "{'a': 1}",
        "{a: 1}",
        "[NaN]",
        "[01]",
        "[+1]",
        "[1}",
        "[1 2]",
        "nul",
        "1 2",
        "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "1" * 2000,
        '"\ud800"',
    ],
)
def test_what_is_no_json_is_told(text: str) -> None:
    with pytest.raises(Malformed):
        mended(text)


SCHEMA: dict[str, Any] = {
    "$defs": {"point": {"type": "object"}, "loop": {"$ref": "#/$defs/loop"}},
    "properties": {
        "text": {"type": "string"},
        "maybe": {"type": ["string", "null"]},
        "either": {"anyOf": [{"type": "integer"}, {"$ref": "#/$defs/point"}]},
        "both": {"allOf": [{"$ref": "#/$defs/point"}, {}]},
        "some": {"enum": ["a", 1]},
        "one": {"const": True},
        "any": {},
        "part": {"anyOf": [{"type": "string"}, {}]},
        "loop": {"$ref": "#/$defs/loop"},
        "lost": {"$ref": "#/nowhere/at/all"},
        "odd": {"type": 7, "anyOf": 3, "enum": "x"},
        "wrong": [],
    },
}
ALL = {"string", "integer", "number", "boolean", "object", "array", "null"}


@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("text", {"string"}),
        ("maybe", {"string", "null"}),
        ("either", {"integer", "object"}),
        ("both", {"object"}),
        ("some", {"string", "integer", "number"}),
        ("one", {"boolean"}),
        *((name, ALL) for name in ("any", "part", "loop", "lost", "odd", "wrong")),
        ("unknown", {"string"}),
    ],
)
def test_types_of_a_parameter(name: str, types: set[str]) -> None:
    assert parameter_types(SCHEMA, name) == types


@pytest.mark.parametrize("schema", [{}, {"properties": 3}, {"properties": {"b": {}}}])
def test_without_a_schema_values_are_text(schema: dict[str, Any]) -> None:
    assert parameter_types(schema, "a") == {"string"}


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("5", {"integer"}, "5"),
        (" 5 \n", {"integer"}, "5"),
        ("5.0", {"integer"}, "5"),
        ("5", {"number"}, "5"),
        ("5.5", {"integer"}, '"5.5"'),
        ("123", {"string"}, '"123"'),
        ("null", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("true", {"integer"}, '"true"'),
        ("1", {"boolean"}, '"1"'),
        ('{"a": [1, "\u00e9"]}', {"object"}, '{"a": [1, "\u00e9"]}'),
        ("[1]", {"object"}, '"[1]"'),
        ('{"a": NaN}', {"object"}, '"{\\"a\\": NaN}"'),
        ("1e999", {"number"}, '"1e999"'),
        ('["\\ud800"]', {"array"}, '["\\ud800"]'),
        ("9" * 5000, {"integer"}, '"' + "9" * 5000 + '"'),
        ("[" * 100000, {"array"}, '"' + "[" * 100000 + '"'),
        ('"quoted"', ALL, '"\\"quoted\\""'),
        ("plain", ALL, '"plain"'),
        ("7", ALL, "7"),
    ],
)
def test_values_by_type(text: str, types: set[str], value: str) -> None:
    assert coerce(text, frozenset(types)) == value
    json.loads(value.replace("9" * 5000, "9"))
