"""Calls that a grammar forces: what the engine is asked for, and what its outputs give."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from server_fakes import CHAT, EOS, TOKENIZER, VOCAB_SIZE, refused
from test_server_text import events
from tool_fakes import CODER, KIMI, OPENING, QWEN, as_folded, asking, folded

from tokenspeed.constraint import MAX_GRAMMAR_CHARS, StructuredOutputs
from tokenspeed.structured.grammar import compile_grammar
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.orders import num_words
from tokenspeed.structured.tokens import token_table

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("add", "name.v2")
]
NAMED = {"type": "function", "function": {"name": "name.v2"}}
DEEP = QWEN.replace("<tool_call></tool_call>", "<\uff5ctool\u2581calls\u2581begin\uff5c>")
TABLE = token_table(TOKENIZER, VOCAB_SIZE, frozenset({EOS}))


def output_under(asked: StructuredOutputs, seed: int) -> str:
    """A text at random that has the form, as the engine would sample it."""
    state = GrammarState(compile_grammar(asked, TABLE, any_whitespace=False), frozenset({EOS}))
    choose = random.Random(seed)
    ids: list[int] = []
    while not state.matcher.is_accepting():
        words = np.zeros(num_words(VOCAB_SIZE), dtype=np.int32)
        state.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB_SIZE]
        ids.append(choose.choice(np.flatnonzero(bits).tolist()))
        assert state.take(ids[-1:]) is None and len(ids) < 600
    return TOKENIZER.decode(ids, skip_special_tokens=False)


FORMATS: dict[str, dict[str, Any]] = {
    "hermes": {"template": QWEN},
    "coder, as hermes": {"template": CODER},
    "glm, as hermes": {"template": QWEN.replace("</tool_call>", "<arg_key></tool_call>")},
    "unknown, as hermes": {"template": QWEN.replace("<tool_call></tool_call>", "]<]minimax[>[")},
    "mistral": {"template": QWEN, "tool_call_parser": "mistral"},
    "mistral, newer": {"template": QWEN, "tool_call_parser": "mistral_args"},
    "pythonic, as hermes": {"template": QWEN, "tool_call_parser": "pythonic"},
    "kimi": {"template": KIMI},
    "deepseek": {"template": DEEP},
    "llama3": {"template": QWEN, "tool_call_parser": "llama3"},
    "json": {"template": QWEN, "tool_call_parser": "json"},
    "harmony": {"template": QWEN, "model_type": "gpt_oss"},
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
async def test_forced_outputs_are_calls(name: str, choice: Any) -> None:
    fields = {"tools": TOOLS, "tool_choice": choice}
    async with asking(**FORMATS[name]) as ask:
        await ask.chat(**fields)
        asked = ask.engine.requests[-1].params.structured_outputs
        assert asked is not None and asked.tool_calls is not None and asked.tool_calls.required
        for seed in range(3):
            text = output_under(asked, seed)
            ask.engine.answers = {0: text}
            whole = as_folded(await ask.chat(**fields))
            ask.engine.answers = {0: text}
            streamed = folded(events(await ask.chat(**fields, stream=True)))
            for call in [*whole["calls"], *streamed["calls"]]:
                call.pop("id")
            assert whole == streamed
            end = "stop" if choice == NAMED else "tool_calls"  # as OpenAI's
            assert (whole["finish_reason"], whole["content"]) == (end, ""), text
            assert whole["calls"]
            for call in whole["calls"]:
                assert 0 <= json.loads(call["arguments"])["n"] < 100
                assert call["name"] in (("name.v2",) if choice == NAMED else ("add", "name.v2"))
            if choice == NAMED:
                assert len(whole["calls"]) == 1


@pytest.mark.parametrize("name", FORMATS)
async def test_a_forced_call_that_is_cut_leaves_no_markup(name: str) -> None:
    """Wherever it is cut: content is empty, and arguments are a beginning of the whole ones."""
    fields = {"tools": TOOLS, "tool_choice": NAMED}
    async with asking(**FORMATS[name]) as ask:
        await ask.chat(**fields)
        text = output_under(ask.engine.requests[-1].params.structured_outputs, 1)
        ask.engine.answers = {0: text}
        (call,) = as_folded(await ask.chat(**fields))["calls"]
        for end in range(1, len(text)):
            ask.engine.answers = {0: text[:end]}
            whole = as_folded(await ask.chat(**fields))
            streamed = folded(events(await ask.chat(**fields, stream=True)))
            assert whole["content"] == streamed["content"] == "", text[:end]
            for cut in [*whole["calls"], *streamed["calls"]]:
                assert cut["name"] == call["name"]
                assert call["arguments"].startswith(cut["arguments"])


async def test_what_is_asked_of_the_engine() -> None:
    cases: list[tuple[Any, Any, tuple[str, ...], bool]] = [
        ("required", None, ("add", "name.v2"), True),
        ("required", False, ("add", "name.v2"), False),
        (NAMED, None, ("name.v2",), False),
    ]
    async with asking(template=QWEN) as ask:
        for choice, parallel, names, is_parallel in cases:
            fields = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
            assert (await ask.chat(**fields)).status_code == 200
            asked = ask.engine.requests[-1].params.structured_outputs
            assert asked is not None and asked.tool_calls is not None
            assert asked.tool_calls.parallel == is_parallel and not asked.reasoning_end
            assert [name for name, _ in asked.tool_calls.tools] == list(names)
            assert all(json.loads(schema) == SCHEMA for _, schema in asked.tool_calls.tools)
        assert (await ask.chat(tools=TOOLS)).status_code == 200
        assert ask.engine.requests[-1].params.structured_outputs is None
    async with asking(template=OPENING) as ask:  # the model may think first
        await ask.chat(tools=TOOLS, tool_choice="required")
        asked = ask.engine.requests[-1].params.structured_outputs
        assert asked is not None and len(asked.reasoning_end) == 1


async def test_strict_tools_are_held_to_their_schema_wherever_they_are_called() -> None:
    strict = [
        {"type": "function", "function": {**tool["function"], "strict": not number}}
        for number, tool in enumerate(TOOLS)
    ]
    async with asking(template=QWEN) as ask:
        assert (await ask.chat(tools=strict)).status_code == 200
        asked = ask.engine.requests[-1].params.structured_outputs
        assert asked is not None and asked.tool_calls is not None
        assert not asked.tool_calls.required
        assert [(name, bool(schema)) for name, schema in asked.tool_calls.tools] == [
            ("add", True),
            ("name.v2", False),
        ]
    for options in (FORMATS["harmony"], {"template": CODER}):
        async with asking(**options) as ask:
            error = refused(await ask.chat(tools=strict))
            assert error["code"] == "unsupported_parameter" and "strict" in error["message"]


async def test_a_function_without_parameters_takes_none() -> None:
    tool = {"type": "function", "function": {"name": "now"}}
    async with asking(template=QWEN) as ask:
        await ask.chat(tools=[tool], tool_choice="required", parallel_tool_calls=False)
        text = output_under(ask.engine.requests[-1].params.structured_outputs, 0)
        ask.engine.answers = {0: text}
        (call,) = as_folded(await ask.chat(tools=[tool], tool_choice="required"))["calls"]
        assert json.loads(call["arguments"]) == {}


async def test_what_cannot_be_forced_is_said() -> None:
    bad = [{"type": "function", "function": {"name": "f", "parameters": {"type": "str"}}}]
    async with asking(template=QWEN) as ask:
        error = refused(await ask.chat(tools=bad, tool_choice="required"))
        assert error["param"] == "tools" and "in tool f" in error["message"]
        error = refused(
            await ask.chat(
                tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
            )
        )
        assert error["param"] == "tools" and "one of them" in error["message"]
        assert (await ask.chat(tools=bad)).status_code == 200


@pytest.mark.parametrize("choice", ["required", "named", "strict"])
async def test_tools_that_are_too_large_to_be_forced_are_refused(choice: str) -> None:
    """On each API; where nothing holds their calls to them, they are taken."""
    large = {"type": "object", "properties": {}, "description": "x" * MAX_GRAMMAR_CHARS}
    function = {"name": "f", "parameters": large, "strict": choice == "strict"}
    flat = {"type": "function", **function}
    theirs = {"name": "f", "input_schema": large, "strict": choice == "strict"}
    named = {"type": "function", "name": "f"}
    messages = [{"role": "user", "content": "Hi"}]
    forms: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        CHAT: (
            {"messages": messages, "tools": [{"type": "function", "function": function}]},
            {"named": {"type": "function", "function": {"name": "f"}}, "required": "required"},
        ),
        "/v1/responses": (
            {"input": "Hi", "tools": [flat]},
            {"named": named, "required": "required"},
        ),
        "/v1/messages": (
            {"messages": messages, "max_tokens": 4, "tools": [theirs]},
            {"named": {"type": "tool", "name": "f"}, "required": {"type": "any"}},
        ),
    }
    async with asking(template=QWEN.replace("{{ tool | tojson }}", "a tool")) as ask:
        for path, (body, choices) in forms.items():
            forced = {"tool_choice": choices[choice]} if choice in choices else {}
            answer = await ask.http.post(path, json=body | forced)
            assert answer.status_code == 400, (path, answer.text)
            assert f"at most {MAX_GRAMMAR_CHARS}" in answer.json()["error"]["message"]
            if path == CHAT:
                assert refused(answer)["param"] == "tools"
            if not function["strict"]:
                assert (await ask.http.post(path, json=body)).status_code == 200
