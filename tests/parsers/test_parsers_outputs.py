"""Recorded outputs of every format, cut at every position, and outputs made up at random."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from parsed import SCHEMAS, parse, parts_of
from recorded_outputs import Case
from recorded_tags import CASES as TAGS
from recorded_tags import deepseek
from recorded_values import VALUES as RAW

from tokenspeed.parsers import harmony
from tokenspeed.parsers.parser import OutputParser
from tokenspeed.parsers.tables import HARMONY, REASONING, TOOLS, output_format

CASES = [*TAGS, *RAW]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.tools}-{case.text[:40]!r}")
def test_recorded_outputs_whatever_their_cut(case: Case) -> None:
    form = output_format(case.reasoning, case.tools)
    text = case.text
    whole = parse(form, [text], is_open=case.is_open)
    found = parts_of(whole)
    if not case.parts.ids:
        found.ids = []
    assert found == case.parts
    assert parse(form, text, is_open=case.is_open) == whole
    for at in range(len(text) + 1):
        assert parse(form, [text[:at], text[at:]], is_open=case.is_open) == whole, at


def test_every_parser_has_recorded_outputs() -> None:
    tested = {case.tools for case in CASES} | {"passthrough"}
    assert tested == {*TOOLS, HARMONY}
    kinds = [REASONING[case.reasoning] for case in CASES if case.reasoning != HARMONY]
    assert all(kind in kinds for kind in REASONING.values())


FRAGMENTS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', '"arguments"', "}"],
    "qwen_coder": [
        *("<tool_call>", "</tool_call>", "<function=add>", "</function>", "<function="),
        *("<parameter=a>", "<parameter=note>", "</parameter>", "5"),
    ],
    "seed_oss": [
        *("<seed:tool_call>", "</seed:tool_call>", "<function=add>", "</function>"),
        *("<parameter=a>", "<parameter=note>", "</parameter>"),
    ],
    "minimax_m2": [
        *("<minimax:tool_call>", "</minimax:tool_call>", '<invoke name="add">', "</invoke>"),
        *('<parameter name="a">', '<parameter name="note">', "</parameter>", '<invoke name="'),
    ],
    "glm45": [
        *("<tool_call>add\n", "</tool_call>", "<arg_key>a</arg_key>", "<arg_key>", "<arg_value>"),
        *("<arg_key>note</arg_key><arg_value>", "</arg_value>", "</arg_key>"),
    ],
    "mistral": ["[TOOL_CALLS]", "add[ARGS]", "[ARGS]", '{"name": "add", "arguments": ', "[", "]"],
    "mistral_args": ["[TOOL_CALLS]add[ARGS]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "add"],
    "pythonic": [
        *("[add(", "a=", "note='", "'", ")", "]", ", ", "(", "\\", "\\x4", "1", "<|python_end|>"),
        *("<|python_start|>[add(", "tags=[", "deep={'k': ", "True", "\\ud8", "n"),
    ],
    "kimik2": [
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("<|tool_call_argument_begin|>", "<|tool_call_end|>", "functions.add:0"),
    ],
    "deepseek31": [
        *map(deepseek, ("calls begin", "calls end", "call begin", "call end", "sep")),
        *("function", "add\n```json\n", "```", "add"),
    ],
    "llama3": ["<|python_tag|>", '{"name": "add", "parameters": ', '"parameters"', ";"],
    "json": ['{"name": "add", "parameters": ', "[", "]", ","],
    "harmony": [*harmony.MARKERS, "assistant", "analysis", "final", "to=functions.add"],
    "passthrough": [],
}
COMMON = [
    *("<think>", "</think>", "\n", " ", "x", "<", "</", "<|", "\u00e9", "\U0001fae0", "\u00b1"),
    *('{"a": 1}', '{"note": "', '{"a": tr', '"', "\\", "{", "}", "[", ":", ",", "True", "1"),
]


@st.composite
def random_outputs(draw: st.DrawFn) -> tuple[str, str, str]:
    """Parsers and a text of pieces that mean something to them."""
    tools = draw(st.sampled_from(sorted(FRAGMENTS)))
    pieces = st.sampled_from(FRAGMENTS[tools] * 2 + COMMON)
    text = "".join(draw(st.lists(pieces, max_size=16)))
    return draw(st.sampled_from(["base", "deepseek_r1", "passthrough"])), tools, text


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({min(place, len(text)) for place in places} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(ends)]


@settings(max_examples=400, deadline=None)
@given(random_outputs(), st.lists(st.integers(0, 120), max_size=8), st.booleans())
@example(("base", "hermes", "<think>a<tool_call>\u00b1</tool_call></think>"), [3, 9], False)
@example(("base", "seed_oss", "<function=add><parameter=a>\u00b1"), [], False)
def test_no_cut_changes_the_events(
    output: tuple[str, str, str], places: list[int], is_open: bool
) -> None:
    reasoning, tools, text = output
    form = output_format(reasoning, tools)
    whole = parse(form, [text], is_open=is_open)
    assert parse(form, cut(text, places), is_open=is_open) == whole
    assert parse(form, text, is_open=is_open) == whole
    parts = parts_of(whole)
    for index, (_, arguments) in enumerate(parts.calls):
        if index not in parts.broken:
            assert isinstance(json.loads(arguments), dict)
    if tools != HARMONY:  # whose headers are no text
        shown = parts.reasoning + parts.content + "".join(text for _, text in parts.calls)
        num_lost = text.count("\u00b1") - shown.count("\u00b1")
        assert num_lost == 0 or (num_lost > 0 and parts.broken), "only of a word that was cut"


@given(random_outputs(), st.booleans())
def test_without_tools_no_call_is_found(output: tuple[str, str, str], is_open: bool) -> None:
    """And an answer without reasoning is kept to the character."""
    reasoning, tools, text = output
    form = output_format(reasoning, tools)
    parts = parts_of(parse(form, text, is_open=is_open, offers=False))
    assert not parts.calls
    if reasoning == "passthrough" and tools != HARMONY:
        assert parts.content == text


WORDS = st.text("ab\u00e9\u4e2d\U0001fae0 \n<>/|{}\"'\\:,", max_size=30).map(str.strip)
VALUES = {
    "a": st.integers(),
    "b": st.floats(allow_nan=False, allow_infinity=False),
    "note": st.text("ab\u00e9\U0001fae0 \n\t<>/|{}\"'\\:,[]", max_size=30),
    "tags": st.lists(st.text(max_size=6), max_size=3),
    "deep": st.none()
    | st.dictionaries(st.text(max_size=5), st.none() | st.text(max_size=6), max_size=2),
    "sure": st.booleans(),
}
CALLS = st.lists(st.fixed_dictionaries({}, optional=VALUES), min_size=1, max_size=3)


def raw(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def written_in(begin: str, key: str, between: str, value_end: str, end: str) -> Any:
    """How a call of `add` is written in tags, without layout around its values."""

    def write(call: dict[str, object]) -> str:
        inner = "".join(f"{key}{each}{between}{raw(call[each])}{value_end}\n" for each in call)
        return f"{begin}\n{inner}{end}"

    return write


_WRITTEN = {
    "seed_oss": written_in(
        "<seed:tool_call>\n<function=add>",
        "<parameter=",
        ">",
        "</parameter>",
        "</function>\n</seed:tool_call>",
    ),
    "minimax_m2": written_in(
        '<minimax:tool_call>\n<invoke name="add">',
        '<parameter name="',
        '">',
        "</parameter>",
        "</invoke>\n</minimax:tool_call>",
    ),
    "glm45": written_in(
        "<tool_call>add",
        "<arg_key>",
        "</arg_key>\n<arg_value>",
        "</arg_value>",
        "</tool_call>",
    ),
}


def write_calls(tools: str, calls: list[dict[str, object]]) -> str:
    """The calls of `add` as a model's template writes them."""
    texts = [json.dumps(call, ensure_ascii=False) for call in calls]
    if tools == "hermes":
        return "\n".join(
            f'<tool_call>\n{{"name": "add", "arguments": {text}}}\n</tool_call>' for text in texts
        )
    if tools == "llama3":
        return "<|python_tag|>" + "; ".join(
            f'{{"name": "add", "parameters": {text}}}' for text in texts
        )
    if tools == "kimik2":
        inner = "".join(
            f"<|tool_call_begin|>functions.add:{i}<|tool_call_argument_begin|>{text}"
            "<|tool_call_end|>"
            for i, text in enumerate(texts)
        )
        return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"
    if tools == "deepseek31":
        inner = "".join(
            f"{deepseek('call begin')}add{deepseek('sep')}{text}{deepseek('call end')}"
            for text in texts
        )
        return f"{deepseek('calls begin')}{inner}{deepseek('calls end')}"
    if tools == "harmony":
        return "".join(
            f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
            f"{text}<|call|>"
            for text in texts
        )
    if tools in _WRITTEN:
        return "\n".join(map(_WRITTEN[tools], calls))
    if tools == "mistral":
        listed = ", ".join(f'{{"name": "add", "arguments": {text}}}' for text in texts)
        return f"[TOOL_CALLS][{listed}]"
    if tools == "mistral_args":
        return "".join(f"[TOOL_CALLS]add[ARGS]{text}" for text in texts)
    if tools == "pythonic":
        written = ", ".join(
            f"add({', '.join(f'{key}={value!r}' for key, value in call.items())})" for call in calls
        )
        return f"<|python_start|>[{written}]<|python_end|>"
    assert tools == "qwen_coder"
    return "\n".join(
        "<tool_call>\n<function=add>\n"
        + "".join(f"<parameter={key}>\n{raw(value)}\n</parameter>\n" for key, value in call.items())
        + "</function>\n</tool_call>"
        for call in calls
    )


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(sorted({*TOOLS, HARMONY} - {"qwen", "json", "passthrough"})),
    WORDS,
    WORDS,
    CALLS,
    st.lists(st.integers(0, 600), max_size=6),
)
def test_what_a_template_writes_is_read_back(
    tools: str, thought: str, said: str, calls: list[dict[str, object]], places: list[int]
) -> None:
    if tools == HARMONY:
        text = f"<|channel|>analysis<|message|>{thought}<|end|>"
        text += f"<|start|>assistant<|channel|>commentary<|message|>{said}<|end|>"
    else:
        text = f"<think>\n{thought}\n</think>\n\n{said}\n\n"
    text += write_calls(tools, calls)
    parts = parts_of(parse(output_format("base", tools), cut(text, places)))
    assert (parts.reasoning, parts.content, parts.broken) == (thought, said, [])
    assert [(name, json.loads(arguments)) for name, arguments in parts.calls] == [
        ("add", call) for call in calls
    ]


def shown(reasoning: str, tools: str, text: str) -> str:
    """What is passed on of a text that may go on."""
    parser = OutputParser(output_format(reasoning, tools), schemas=SCHEMAS)
    return "".join(getattr(event, "text", "") for event in parser.feed(text))


HERMES_ADD = '<tool_call>{"name": "add", "arguments": {'
CODER_ADD = "<tool_call><function=add><parameter=note>"


@pytest.mark.parametrize(
    ("tools", "text", "passed"),
    [
        ("hermes", "abc", "abc"),
        ("hermes", "abc<", "abc"),
        ("hermes", "abc<tool_c", "abc"),
        ("hermes", "abc<tool_x", "abc<tool_x"),
        ("hermes", "a<b<too", "a<b"),
        ("hermes", "abc \n", "abc"),
        ("hermes", HERMES_ADD + '"note": "a long', '{"note": "a long'),
        ("hermes", HERMES_ADD + '"a": 12', '{"a": '),
        ("hermes", HERMES_ADD + '"note": "a\\u00', '{"note": "a'),
        ("qwen_coder", CODER_ADD + "a long", '{"note": "a long'),
        ("qwen_coder", CODER_ADD + "a\n", '{"note": "a'),
        ("qwen_coder", CODER_ADD + "a</parameter>", '{"note": "a'),
        ("qwen_coder", CODER_ADD + "a</parameter>b", '{"note": "a</parameter>b'),
        ("glm45", "<tool_call>add\n<arg_key>note</arg_key><arg_value>a </arg", '{"note": "a '),
        ("minimax_m2", '<invoke name="add"><parameter name="note">a\n', '{"note": "a\\n'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"note": "a', '{"note": "a'),
        ("pythonic", "[add(note='a", '{"note": "a'),
        ("pythonic", "[add(note='a\\n", '{"note": "a\\n'),
        ("pythonic", "[add(note='a\\x4", '{"note": "a'),
        ("pythonic", "[add(a=12", '{"a": '),
        ("pythonic", "[1, 2", "[1, 2"),
        ("kimik2", "<|tool_call_begin|>add:0<|tool_call_argument_begin|>{", "{"),
        ("harmony", "<|channel|>final<|message|>abc", "abc"),
        ("llama3", "abc", "abc"),
        ("json", "abc <tool_call>", "abc <tool_call>"),
        ("passthrough", "abc \n", "abc \n"),
    ],
)
def test_no_more_is_held_back_than_must_be(tools: str, text: str, passed: str) -> None:
    assert shown("base", tools, text) == passed


@pytest.mark.parametrize(
    ("text", "passed"),
    [
        ("<think>a thought", "a thought"),
        ("<think>a thought</thi", "a thought"),
        (" a", " a"),
        ("  <th", ""),
    ],
)
def test_reasoning_is_passed_on_at_once(text: str, passed: str) -> None:
    assert shown("base", "hermes", text) == passed
