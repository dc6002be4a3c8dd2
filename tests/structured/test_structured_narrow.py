"""Numbers end, and calls have the properties that their schema lists."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structured_tiny import EOS_IDS, Compiler, allowed, follows, tiny_tokenizer

from tokenspeed.constraint import ARGUMENTS, NAME, StructuredOutputs, ToolCallFormat, ToolCalls
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.narrow import narrow
from tokenspeed.structured.tokens import TokenTable

TOKENIZER = tiny_tokenizer()
CALLS = ToolCallFormat(call=("{", NAME, ":", ARGUMENTS, "}"))
DIGITS = {TOKENIZER.encode(each)[0] for each in "123456789"}


@pytest.fixture(scope="module")
def compiler(table: TokenTable) -> Compiler:
    return Compiler(table)


def json_state(compiler: Compiler, schema: Any) -> GrammarState:
    return GrammarState(compiler.compile(StructuredOutputs(json=schema)), EOS_IDS)


def arguments_follow(compiler: Compiler, schema: Any, arguments: str) -> bool:
    calls = ToolCalls(format=CALLS, tools=(("f", json.dumps(schema)),), parallel=False)
    asked = StructuredOutputs(tool_calls=calls)
    return follows(GrammarState(compiler.compile(asked), EOS_IDS), f"{{f:{arguments}}}")


@pytest.mark.parametrize("kind", ["integer", "number", ["null", "integer"], ["number", "string"]])
@pytest.mark.parametrize("begin", ["", "-", "1."])
@pytest.mark.parametrize("bounds", [{}, {"minimum": -7}, {"exclusiveMaximum": 1e12}])
def test_whoever_only_writes_digits_comes_to_an_end(
    compiler: Compiler, kind: Any, begin: str, bounds: Any
) -> None:
    state = json_state(compiler, {"type": kind} | bounds)
    for token in TOKENIZER.encode(begin, add_special_tokens=False):
        if token in allowed(state):
            state.take([token])
    count = 0
    while digits := allowed(state) & DIGITS:
        state.take([min(digits)])
        count += 1
        assert count < 30
    assert state.matcher.is_accepting()


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "integer"}, "-8999999999999999999"),
        ({"type": "number", "enum": [0.1234567891234]}, "0.1234567891234"),
        ({"type": "number"}, "123456789012345678.123456789"),
        ({"type": "number", "minimum": 0, "maximum": 1e-8}, "0.00000000123456789"),
        ({"type": "number", "multipleOf": 0.25}, "-7.75"),
        ({"allOf": [{"type": "number"}, {"multipleOf": 7}]}, "14"),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}, "title": "x"}, "0.5"),
        ({"type": ["integer", "null"]}, "null"),
    ],
    ids=str,
)
def test_what_schemas_mean_is_still_allowed(compiler: Compiler, schema: Any, text: str) -> None:
    assert follows(json_state(compiler, schema), text)


CITY = {"city": {"type": "string"}, "days": {"type": "integer"}}
ORDINARY = {"type": "object", "properties": CITY, "required": ["city"]}
BASE = {"properties": {"id": {"type": "integer"}}, "required": ["id"]}


BOTH = '{"in":{"city":"a","id":1}}'


def in_(schema: dict[str, Any]) -> dict[str, Any]:
    return {"properties": {"in": schema}}


@pytest.mark.parametrize(
    ("schema", "arguments", "is_allowed"),
    [
        (ORDINARY, '{"city":"a"}', True),
        (ORDINARY, '{"city":"a","days":3}', True),
        (ORDINARY, '{"city":"a","x":3}', False),
        (ORDINARY | {"additionalProperties": True}, '{"city":"a","x":3}', True),
        (ORDINARY | {"additionalProperties": {"type": "null"}}, '{"city":"a","x":null}', True),
        (ORDINARY | {"patternProperties": {"^x": {}}}, '{"city":"a","x":3}', True),
        (ORDINARY | {"required": ["y"]}, '{"city":"a","y":3}', True),
        ({"properties": {}}, "{}", True),
        ({"properties": {}}, '{"x":1}', False),
        ({"type": "object"}, '{"x":1}', True),
        ({"properties": {"in": ORDINARY}}, '{"in":{"city":"a","x":1}}', False),
        ({"properties": {"in": {"items": ORDINARY}}}, '{"in":[{"city":"a","x":1}]}', False),
        (
            {"properties": {"in": {"$ref": "#/$defs/o"}}, "$defs": {"o": BASE}},
            '{"in":{"id":1}}',
            True,
        ),
        (
            {"properties": {"in": {"$ref": "#/$defs/o"}}, "$defs": {"o": BASE}},
            '{"in":{"id":1,"x":1}}',
            False,
        ),
        ({"allOf": [ORDINARY, BASE]}, '{"city":"a","id":1}', True),
        (
            {"allOf": [{"$ref": "#/$defs/o"}], "title": "t", "$defs": {"o": BASE}},
            '{"id":1,"x":1}',
            False,
        ),
        (ORDINARY | {"$ref": "#/$defs/o", "$defs": {"o": BASE}}, '{"city":"a","id":1}', True),
        ({"anyOf": [ORDINARY, BASE]}, '{"id":1,"x":1}', False),
        (ORDINARY | {"anyOf": [BASE, {}]}, '{"city":"a","id":1}', True),
        ({"allOf": [in_(ORDINARY), in_(BASE)]}, BOTH, True),
        (in_(ORDINARY) | {"$ref": "#/$defs/o", "$defs": {"o": in_(BASE)}}, BOTH, True),
        (in_(ORDINARY) | {"patternProperties": {"^in$": BASE}}, BOTH, True),
        (
            in_({"allOf": [{"items": ORDINARY}, {"items": BASE}]}),
            '{"in":[{"city":"a","id":1}]}',
            True,
        ),
    ],
    ids=str,
)
def test_calls_have_the_properties_that_are_listed(
    compiler: Compiler, schema: Any, arguments: str, is_allowed: bool
) -> None:
    assert arguments_follow(compiler, schema, arguments) == is_allowed


def test_a_demanded_json_may_have_others(compiler: Compiler) -> None:
    assert follows(json_state(compiler, ORDINARY), '{"city":"a","x":3}')


ANY_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.sampled_from(["number", "#"])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(
                [
                    *(
                        "type",
                        "properties",
                        "required",
                        "anyOf",
                        "allOf",
                        "$ref",
                        "items",
                        "minimum",
                    ),
                    *(
                        "maximum",
                        "exclusiveMinimum",
                        "minProperties",
                        "additionalProperties",
                        "$defs",
                    ),
                ]
            ),
            inner,
            max_size=5,
        ),
    ),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["type", "properties", "allOf", "required"]), ANY_JSON))
def test_nothing_that_is_sent_breaks_it_and_twice_is_once(schema: dict[str, Any]) -> None:
    narrow(schema, closes=True)
    once = copy.deepcopy(schema)
    narrow(schema, closes=True)
    assert re.sub("nan", "", repr(schema)) == re.sub("nan", "", repr(once))
