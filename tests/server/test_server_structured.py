"""Fields that demand a form of the output: all their spellings, and schemas that cannot be used."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from server_fakes import TOKENIZER, Asker, FakeClient, make_state, refused

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.server.structured import check_grammar
from tokenspeed.structured.host import GrammarHost

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
LARK = 'start: "a" | "b"'


def wrapped(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


TAKEN: list[tuple[dict[str, Any], StructuredOutputs | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": None, "guided_json": None}, None),
    ({"response_format": {"type": "json_object"}}, StructuredOutputs(json_object=True)),
    ({"response_format": wrapped(SCHEMA)}, StructuredOutputs(json=SCHEMA)),
    ({"response_format": wrapped(True)}, StructuredOutputs(json=True)),
    ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputs(json=SCHEMA)),
    ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
    ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputs(choice=("a", "b"))),
    ({"structured_outputs": {"grammar": LARK}}, StructuredOutputs(grammar=LARK)),
    ({"structured_outputs": {"json_object": True}}, StructuredOutputs(json_object=True)),
    (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        StructuredOutputs(json=SCHEMA, disable_any_whitespace=True),
    ),
    ({"guided_json": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    ({"guided_json": '{"type": "null"}'}, StructuredOutputs(json='{"type": "null"}')),
    ({"guided_regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"guided_choice": ["a", "b"]}, StructuredOutputs(choice=("a", "b"))),
    ({"guided_grammar": LARK}, StructuredOutputs(grammar=LARK)),
    ({"json_schema": SCHEMA}, StructuredOutputs(json=SCHEMA)),
    ({"regex": "a+"}, StructuredOutputs(regex="a+")),
    ({"ebnf": 'root ::= "a"'}, StructuredOutputs(grammar='root ::= "a"')),
]


@pytest.mark.parametrize(("fields", "asked"), TAKEN, ids=[str(case[0])[:60] for case in TAKEN])
async def test_every_spelling(
    ask: Asker, fields: dict[str, Any], asked: StructuredOutputs | None
) -> None:
    for answer in (await ask.chat(**fields), await ask.completion(**fields)):
        assert answer.status_code == 200, answer.text
        assert ask.engine.requests[-1].params.structured_outputs == asked


BAD_SCHEMAS = [
    *([], "x", 5, None, False),
    *({"type": "str"}, {"type": "string", "pattern": "[unclosed"}),
    *({"type": "string", "pattern": "(?=a)b"}, {"type": "string", "format": "phone"}),
    *({"enum": []}, {"type": "integer", "minimum": 5, "maximum": 3}),
    *({"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:9/x.json"}, {"not": {}}),
]
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"response_format": wrapped(schema)}, "response_format") for schema in BAD_SCHEMAS),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": SCHEMA}}, "response_format"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {}}, "response_format"),
    ({"response_format": "json"}, "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs"),
    ({"structured_outputs": {"pattern": "a"}}, "structured_outputs"),
    ({"structured_outputs": [1]}, "structured_outputs"),
    ({"structured_outputs": {"json": 5}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "reasoning_end": [1]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "reasoning_end": [1 << 64]}}, "structured_outputs"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs"),
    ({"guided_choice": "ab"}, "guided_choice"),
    ({"guided_choice": [1]}, "guided_choice"),
    ({"guided_regex": "(a"}, "guided_regex"),
    ({"guided_regex": "(" * 9000}, "guided_regex"),
    ({"guided_regex": "a" * 70_000}, "guided_regex"),
    ({"guided_grammar": "start: nowhere"}, "guided_grammar"),
    ({"guided_grammar": ""}, "guided_grammar"),
    ({"guided_grammar": "root ::= " + "(" * 5000}, "guided_grammar"),
    ({"guided_json": '{"type": '}, "guided_json"),
    ({"guided_json": {"a": "x" * 200_000}}, "guided_json"),
    ({"guided_json": {"oneOf": [{"const": 1}, {"const": 2}]}}, "guided_json"),
    ({"regex": "a", "guided_regex": "b"}, "regex"),
    ({"response_format": {"type": "json_object"}, "ebnf": LARK}, "ebnf"),
    ({"guided_regex": "a", "min_tokens": 3}, "min_tokens"),
    ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=[str(case[0])[:60] for case in REFUSED])
async def test_what_cannot_be_is_refused_before_anything_runs(
    ask: Asker, fields: dict[str, Any], param: str
) -> None:
    for stream in (False, True):
        fields["stream"] = stream
        assert refused(await ask.chat(**fields))["param"] == param
        assert refused(await ask.completion(**fields))["param"] == param
    assert not ask.engine.requests


async def test_the_place_in_the_schema_is_named(ask: Asker) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "str"}}}}
    error = refused(await ask.chat(response_format=wrapped(schema)))
    assert "at $.properties.a.items: Invalid type: str" in error["message"]


async def test_a_grammar_that_takes_too_long_is_refused_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, grammar_compile_timeout_secs=0.1))
    monkeypatch.setattr(GrammarHost, "open", lambda self, job: None)  # as if one never came
    slow = asyncio.create_task(ask.chat(guided_regex="a"))
    await ask.check_alive()
    assert "within 0.1 s (--grammar-compile-timeout-secs)" in refused(await slow)["message"]
    waiting = [asyncio.create_task(ask.chat(guided_regex=f"b{i}")) for i in range(256)]
    while ask.state.grammars.num_waiting < len(waiting):
        await asyncio.sleep(0)
    assert "Retry later" in refused(await ask.chat(guided_regex="c"), 429)["message"]
    for each in waiting:
        assert "within 0.1 s" in refused(await each)["message"]
    monkeypatch.undo()
    assert (await ask.chat(guided_regex="a")).status_code == 200
    await ask.http.aclose()


async def test_nothing_is_compiled_for_those_who_have_gone() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client))
    pool = ask.state.grammars
    gone = asyncio.create_task(check_grammar(pool, {}, StructuredOutputs(json=SCHEMA)))
    while not pool.num_waiting:
        await asyncio.sleep(0)
    (grammar,) = pool._kept.values()
    gone.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await gone
    assert not pool._kept and not grammar.is_alive
    assert (await ask.chat(response_format=wrapped(SCHEMA))).status_code == 200
    (grammar,) = pool._kept.values()
    assert grammar.is_settled and not grammar.is_alive  # the verdict is all that is kept
    await ask.http.aclose()


async def test_without_a_tokenizer_there_is_no_structure() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, tokenizer=None))
    fields = {"prompt": TOKENIZER.encode("Hi"), "regex": "a"}
    assert "tokenizer" in refused(await ask.completion(**fields))["message"]
    await ask.http.aclose()
