"""Grammars of tool calls, in the spellings of several families."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from structured_tiny import CALL, EOS_IDS, Compiler, allowed, follows, tiny_tokenizer

from tokenspeed.constraint import (
    ARGUMENTS,
    NAME,
    NUMBER,
    StructuredOutputs,
    ToolCallFormat,
    ToolCalls,
)
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.tokens import TokenTable

TOKENIZER = tiny_tokenizer()
HERMES = ToolCallFormat(
    call=('<tool_call>\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n</tool_call>"),
    separator="\n",
)
MARKED = ToolCallFormat(
    begin="<|call|>[", call=("{", NAME, ":", NUMBER, "|", ARGUMENTS, "}"), separator=",", end="]"
)
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}
TOOLS = (("add", json.dumps(SCHEMA)), ("name.v2", json.dumps(SCHEMA)))


@pytest.fixture(scope="module")
def compiler(table: TokenTable) -> Compiler:
    return Compiler(table)


def start(compiler: Compiler, **fields: Any) -> GrammarState:
    asked = StructuredOutputs(tool_calls=ToolCalls(**fields))
    return GrammarState(compiler.compile(asked), EOS_IDS)


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


ONE, TWO = hermes("add", '{"n": 1}'), hermes("name.v2", '{"n":22}')


@pytest.mark.parametrize(
    ("text", "required", "free"),
    [
        (ONE, True, True),
        (f"{ONE}\n{TWO}", True, True),
        (f"{ONE}{TWO}", False, True),
        (f"I will. {ONE}", False, True),
        (f"{ONE} done", False, True),
        ("no call", False, True),
        ("", False, True),
        (hermes("other", "{}"), False, False),
        (hermes("add", '{"n": 100}'), False, False),
        (hermes("add", "{}"), False, False),
        (ONE[:-3], False, False),
    ],
)
def test_what_is_a_call(compiler: Compiler, text: str, required: bool, free: bool) -> None:
    fields = {"format": HERMES, "tools": TOOLS}
    assert follows(start(compiler, **fields), text) == required
    assert follows(start(compiler, **fields, parallel=False), text) == (text == ONE)
    assert follows(start(compiler, **fields, required=False), text) == free


def test_special_tokens_are_tokens(compiler: Compiler) -> None:
    state = start(compiler, format=MARKED, tools=TOOLS)
    assert allowed(state) == {CALL}
    assert follows(state, '<|call|>[{add:7|{"n": 5}},{name.v2:12|{"n": 5}}]')
    as_text = start(compiler, format=MARKED, tools=TOOLS, required=False)
    spelled = [TOKENIZER.encode(each)[0] for each in "<|call|>["]
    assert as_text.take(spelled) is None and as_text.matcher.is_accepting()
    assert not follows(start(compiler, format=MARKED, tools=TOOLS, required=False), "a<|call|>b")


@pytest.mark.parametrize("spelling", [HERMES, MARKED])
def test_random_outputs_are_calls(compiler: Compiler, spelling: ToolCallFormat) -> None:
    ended = 0
    for seed in range(6):
        state = start(compiler, format=spelling, tools=TOOLS, parallel=False)
        choose, ids = random.Random(seed), []
        while not state.matcher.is_accepting() and len(ids) < 300:
            ids.append(choose.choice(sorted(allowed(state))))
            assert state.take(ids[-1:]) is None
        text = TOKENIZER.decode(ids, skip_special_tokens=False)
        ended += state.matcher.is_accepting()
        if state.matcher.is_accepting() and spelling is HERMES:
            call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
            assert call["name"] in ("add", "name.v2") and 0 <= call["arguments"]["n"] < 100
    assert ended > 3


def test_a_bad_schema_names_its_tool(compiler: Compiler) -> None:
    bad = json.dumps({"type": "object", "properties": {"a": {"type": "str"}}})
    with pytest.raises(InvalidRequest, match=r"in tool search, at \$\.properties\.a: Invalid type"):
        start(compiler, format=HERMES, tools=(*TOOLS, ("search", bad)))
    with pytest.raises(ValueError, match="a tool's name"):
        ToolCalls(format=HERMES, tools=(('"; start: "x', ""),))
    with pytest.raises(ValueError, match="a tool's name"):
        ToolCalls(format=HERMES, tools=())
    anything = start(compiler, format=HERMES, tools=(("add", ""),))
    assert follows(anything, hermes("add", '{"x": [1, {"y": null}]}'))
