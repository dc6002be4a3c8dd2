"""JSON schemas: what is refused and where, and that what is accepted holds for every output."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schema_cases import SCHEMAS, holds
from structured_tiny import EOS_IDS, Compiler, allowed, tiny_tokenizer

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.schema import MAX_CHAIN, MAX_DEPTH, parse_schema
from tokenspeed.structured.tokens import TokenTable

TOKENIZER = tiny_tokenizer()
SPACES = {token for token in range(150) if TOKENIZER.token_bytes(token).isspace()}


@pytest.fixture(scope="module")
def compiler(table: TokenTable) -> Compiler:
    return Compiler(table)


def nested(part: Any) -> dict[str, Any]:
    """`part` three levels down."""
    inner = {"type": "array", "prefixItems": [{"type": "null"}, part], "minItems": 2}
    properties = {"ok": {"type": "string"}, "bad": inner}
    return {"type": "object", "properties": properties, "required": ["bad"]}


NESTED_AT = "$.properties.bad.prefixItems[1]"
REFUSED: dict[str, tuple[Any, str]] = {
    "list": ([], "an object or a boolean"),
    "text": ("x", "an object or a boolean"),
    "number": (5, "an object or a boolean"),
    "false": (False, "unsatisfiable"),
    "round": (
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        "no output can satisfy it",
    ),
    "remainders": ({"properties": {"a": {"multipleOf": 99999989}}}, "multipleOf"),
    "remainders of several": (
        {"allOf": [{"multipleOf": 101}, {"multipleOf": 103}, {"multipleOf": 107}]},
        "multipleOf",
    ),
    "remainders of parts": ({"multipleOf": 123.4567}, "multipleOf"),
    "remainders of allOf in allOf": (
        {"allOf": [{"allOf": [{"multipleOf": 9973}]}, {"allOf": [{"multipleOf": 9967}]}]},
        "multipleOf",
    ),
    "patterns": ({"patternProperties": {f"^p{i}x": {} for i in range(65)}}, "too many to compare"),
    "patterns and names": (
        {
            "properties": {f"n{i}": {} for i in range(300)},
            "patternProperties": {f"^p{i}x": {} for i in range(20)},
        },
        "too many to compare",
    ),
    "count": ({"type": "object", "minProperties": 2, "required": ["a"]}, "minProperties"),
    "one of": ({"oneOf": [{"const": 1}, {"const": 2}]}, "oneOf"),
    "type": ({"type": "str"}, "invalid type"),
    "pattern": ({"type": "string", "pattern": "[unclosed"}, "unclosed character class"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "format": ({"type": "string", "format": "phone"}, "phone"),
    "empty enum": ({"enum": []}, "empty"),
    "bounds": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "lengths": ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
    "nowhere": ({"$ref": "#/$defs/nowhere"}, "nowhere"),
    "web": ({"$ref": "http://127.0.0.1:1/schema.json"}, "does not fetch"),
    "not": ({"not": {"type": "string"}}, "not"),
    "if": ({"if": {"type": "string"}, "then": {}}, "if"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {"const": 1}}, "contains"),
    "required": ({"type": "object", "required": "a"}, "required"),
    "negative": ({"type": "array", "minItems": -1}, "minItems"),
    "overlap": (
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}, "b$": {}}},
        "not disjoint",
    ),
    "lenient": ({"not": {}, "x-guidance": {"lenient": True}}, "not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_and_where(compiler: Compiler, case: str) -> None:
    schema, reason = REFUSED[case]
    with pytest.raises(InvalidRequest, match=f"(?i){re.escape(reason)}") as failed:
        compiler.compile(StructuredOutputs(json=json.dumps(schema)))
    assert "\n" not in str(failed.value) and len(str(failed.value)) < 500
    if isinstance(schema, dict) and case != "round":  # references mean nothing further down
        with pytest.raises(InvalidRequest, match=f"(?i){re.escape(reason)}") as failed:
            compiler.compile(StructuredOutputs(json=nested(schema)))
        assert f", at {NESTED_AT}" in str(failed.value)


def test_bounds_of_size_and_depth(compiler: Compiler) -> None:
    deep: Any = {"type": "string"}
    for _ in range(MAX_DEPTH):
        deep = {"items": deep}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_DEPTH} levels"):
        compiler.compile(StructuredOutputs(json=deep))
    parse_schema(json.dumps(deep["items"]))
    with pytest.raises(InvalidRequest, match=r"levels|nested too deeply"):
        compiler.compile(StructuredOutputs(json='{"items":' * 9000 + "1" + "}" * 9000))
    with pytest.raises(ValueError, match="characters; at most"):
        StructuredOutputs(json={"description": "x" * 200_000})
    chain = {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(MAX_CHAIN)}
    chain[f"d{MAX_CHAIN}"] = {}
    with pytest.raises(InvalidRequest, match=f"more than {MAX_CHAIN} schemas deep"):
        compiler.compile(StructuredOutputs(json={"$ref": "#/$defs/d0", "$defs": chain}))
    many = {"type": "object", "properties": {f"p{i}": {} for i in range(1500)}}
    with pytest.raises(InvalidRequest, match="Current row has"):
        compiler.compile(StructuredOutputs(json=many))


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
        {"$ref": "#/$defs/a", "multipleOf": 9967},
        {"items": {"$ref": "#/$defs/c"}},
    ],
    ids=["both", "beside", "chain"],
)
def test_remainders_are_counted_through_references(compiler: Compiler, schema: Any) -> None:
    defs = {
        "a": {"multipleOf": 9973},
        "b": {"multipleOf": 9967},
        "c": {"$ref": "#/$defs/a", "allOf": [{"$ref": "#/$defs/b"}, {"$ref": "#/$defs/c"}]},
    }
    with pytest.raises(InvalidRequest, match="remainders to tell apart"):
        compiler.compile(StructuredOutputs(json=schema | {"$defs": defs}))


def test_references_that_go_round_are_taken(compiler: Compiler) -> None:
    tree = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
    compiler.compile(StructuredOutputs(json=tree))


def walk(state: GrammarState, seed: int, *, prefer: set[int], limit: int = 400) -> str | None:
    """A random output; None if it has not ended after `limit` tokens."""
    choose = random.Random(seed)
    ids: list[int] = []
    for _ in range(limit):
        tokens = allowed(state)
        assert tokens and state.error is None
        token = choose.choice(sorted(tokens & prefer or tokens))
        if token in EOS_IDS:
            assert state.matcher.is_accepting() and EOS_IDS <= tokens
            return TOKENIZER.decode(ids)
        assert not (state.matcher.is_accepting() and len(tokens) == len(EOS_IDS))
        ids.append(token)
        assert state.take(ids[-1:]) is None
    return None


def start(compiler: Compiler, schema: Any) -> GrammarState:
    return GrammarState(compiler.compile(StructuredOutputs(json=schema)), EOS_IDS)


SCORE = {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 1000}


@pytest.mark.parametrize("pattern", ["^score$", "^s", "o"])
def test_overlapping_patterns_and_properties(compiler: Compiler, pattern: str) -> None:
    schema = {
        "type": "object",
        "properties": {"score": SCORE},
        "required": ["score"],
        "additionalProperties": False,
        "patternProperties": {pattern: {"type": "integer", "minimum": 0, "maximum": 1000}},
    }
    if pattern != "^score$":
        schema["maxProperties"] = 1
    ended = 0
    for seed in range(8):
        text = walk(start(compiler, schema), seed, prefer=set())
        if text is not None:
            ended += 1
            assert json.loads(text)["score"] % 5 == 0
    assert ended > 3


def test_white_space_is_bounded(compiler: Compiler) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    text = walk(start(compiler, schema), 1, prefer=SPACES)
    assert text is not None and json.loads(text) == {"a": 1}
    gaps = re.findall(r"\s+", text)
    assert len(gaps) == 4 and all(20 < len(gap) <= 41 for gap in gaps)
    bare = StructuredOutputs(json=schema, disable_any_whitespace=True)
    state = GrammarState(compiler.compile(bare), EOS_IDS)
    assert walk(state, 1, prefer=SPACES) == '{"a":1}'


@settings(max_examples=60, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99))
def test_whatever_ends_is_valid(compiler: Compiler, schema: Any, seed: int) -> None:
    text = walk(start(compiler, schema), seed, prefer=set())
    if text is not None:
        assert holds(schema, json.loads(text)), (schema, text)
