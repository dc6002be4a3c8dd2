"""Outputs as models write them, whole, odd and cut, and what they hold: raw values and Python."""

from __future__ import annotations

from parsed import Parts
from recorded_outputs import OSLO, WEATHER, Case

SEED_OSLO = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Oslo</parameter>\n</function>\n"
    "</seed:tool_call>"
)
M2_OSLO = (
    '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Oslo</parameter>\n'
    "</invoke>\n</minimax:tool_call>"
)
GLM_OSLO = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call>"
)
ADD = (
    '{"a": 7, "b": 1.5, "note": "123", "tags": ["x", "\u00e9"], "deep": null, "sure": true, '
    '"other": "5"}'
)
ADD_VALUES = (
    *(("a", "7"), ("b", "1.50"), ("note", "123"), ("tags", '["x", "\u00e9"]'), ("deep", "None")),
    *(("sure", "True"), ("other", "5")),
)


def pairs(begin: str, between: str, end: str) -> str:
    return "".join(f"{begin}{key}{between}{value}{end}\n" for key, value in ADD_VALUES)


SEED = [
    Case(
        "seed_oss",
        "seed_oss",
        f"<seed:think>a</seed:think>b\n{SEED_OSLO}",
        Parts("a", "b", [WEATHER]),
    ),
    Case(
        "base",
        "seed_oss",
        f"<seed:tool_call>\n<function=add>\n{pairs('<parameter=', '>', '</parameter>')}"
        "</function>\n</seed:tool_call>",
        Parts(calls=[("add", ADD)]),
    ),
    # No layout: line breaks belong to the value.
    Case(
        "base",
        "seed_oss",
        "<seed:tool_call><function=add><parameter=note>\na\n</parameter></function>"
        "</seed:tool_call>",
        Parts(calls=[("add", '{"note": "\\na\\n"}')]),
    ),
    Case("base", "seed_oss", "<seed:tool_call>x", Parts(content="<seed:tool_call>x")),
]

MINIMAX = [
    Case(
        "minimax",
        "minimax_m2",
        f"a\n</think>\n\n{M2_OSLO}",
        Parts("a", "", [WEATHER]),
        is_open=True,
    ),
    Case(
        "base",
        "minimax_m2",
        'Two.\n<minimax:tool_call>\n<invoke name="add">\n'
        + pairs('<parameter name="', '">', "</parameter>")
        + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>\n',
        Parts("", "Two.", [("add", ADD), ("now", "{}")]),
    ),
    Case(
        "base",
        "minimax_m2",
        '<minimax:tool_call><invoke name="add"><parameter name="note"><invoke name="x"></invoke> '
        "</parameter></invoke></minimax:tool_call>",
        Parts(calls=[("add", '{"note": "<invoke name=\\"x\\"></invoke> "}')]),
    ),
    Case(
        "base",
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="note">cut',
        Parts(calls=[("add", '{"note": "cut')], broken=[0]),
    ),
    *(
        Case("base", "minimax_m2", text, Parts(content=text))
        for text in (
            '<minimax:tool_call>\n<invoke name="rm">\n</invoke>\n</minimax:tool_call>',
            "<minimax:tool_call>\nword",
            '<invoke name="add',
        )
    ),
]

GLM = [
    Case("glm45", "glm45", f"\n<think>a</think>\nb\n{GLM_OSLO}", Parts("a", "b", [WEATHER])),
    Case("base", "glm45", f"{GLM_OSLO}\n{GLM_OSLO}", Parts(calls=[WEATHER] * 2)),
    Case("base", "glm45", GLM_OSLO.replace("\n", ""), Parts(calls=[WEATHER])),
    Case("base", "glm45", "<tool_call>now\n</tool_call>", Parts(calls=[("now", "{}")])),
    Case("base", "glm45", "<tool_call>now</tool_call>!", Parts("", "!", [("now", "{}")])),
    Case(
        "base",
        "glm45",
        "<tool_call>add\n"
        + pairs("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
        + "</tool_call>",
        Parts(calls=[("add", ADD)]),
    ),
    Case(
        "base",
        "glm45",
        "<tool_call>add\n<arg_key>note</arg_key>\n<arg_value>\n</arg_value> <tool_call>"
        "</arg_value>\n</tool_call>",
        Parts(calls=[("add", '{"note": "\\n</arg_value> <tool_call>"}')]),
    ),
    Case(
        "base",
        "glm45",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key> x",
        Parts("", "<arg_key>b</arg_key> x", [("add", '{"a": 1')], broken=[0]),
    ),
    *(
        Case("base", "glm45", text, Parts(content=text))
        for text in (
            "<tool_call>rm\n<arg_key>x</arg_key>\n<arg_value>y</arg_value>\n</tool_call>",
            '<tool_call>{"name": "now"}</tool_call>',
            "<tool_call>get_wea",
            "<tool_call>",
        )
    ),
]

MISTRAL = [
    Case(
        "mistral",
        "mistral",
        f"[THINK]a[/THINK]b[TOOL_CALLS]get_weather[ARGS]{OSLO}[TOOL_CALLS]now[ARGS]{{}}",
        Parts("a", "b", [WEATHER, ("now", "{}")]),
    ),
    Case(
        "base",
        "mistral_args",
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefghi[ARGS]{OSLO}\n",
        Parts(calls=[WEATHER], ids=["abcdefghi"]),
    ),
    Case(
        "base",
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {OSLO}, "id": "123456789"}}, '
        '{"name": "now", "arguments": {}}]',
        Parts(calls=[WEATHER, ("now", "{}")]),
    ),
    Case("base", "mistral", '[TOOL_CALLS]{"name": "now"}', Parts(calls=[("now", "{}")])),
    Case(
        "base",
        "mistral_args",
        '[TOOL_CALLS]add[ARGS]{"note": "cut',
        Parts(calls=[("add", '{"note": "cut')], broken=[0]),
    ),
    *(
        Case("base", "mistral", text, Parts(content=text))
        for text in (
            "[TOOL_CALLS]rm[ARGS]{}",
            "[TOOL_CALLS]now[ARGS][1]",
            "[TOOL_CALLS]now",
            "[TOOL_CALLS][1]",
            "[TOOL_CALL",
            "[1, 2]",
        )
    ),
]


def python(arguments: str, expected: str) -> Case:
    return Case("base", "pythonic", f"[add({arguments})]", Parts(calls=[("add", expected)]))


PYTHON = [
    Case("base", "pythonic", '[get_weather(city="Oslo")]', Parts(calls=[WEATHER])),
    Case(
        "base",
        "pythonic",
        "<|python_start|>[get_weather(city='Oslo'), now()]<|python_end|>",
        Parts(calls=[WEATHER, ("now", "{}")]),
    ),
    Case(
        "base",
        "pythonic",
        " [ now( ) ,\n get_weather( city = 'Oslo' , ) ] \n",
        Parts(calls=[("now", "{}"), WEATHER]),
    ),
    python(
        "a=-7, b=.5, sure=True, deep=None, tags=['x', \"y\",], o={'k': (1, 2.50), \"l\": {}, }",
        '{"a": -7, "b": 0.5, "sure": true, "deep": null, "tags": ["x", "y"], '
        '"o": {"k": [1, 2.5], "l": {}}}',
    ),
    python(
        r"""note='it\'s "a"\n\x41\u00e9\d\0 ' """.strip(),
        '{"note": "it\'s \\"a\\"\\nA\u00e9\\\\d\\u0000 "}',
    ),
    python("note='a\nb])'", '{"note": "a\\nb])"}'),
    python("a=+1_000, b=1e3", '{"a": 1000, "b": 1000.0}'),
    python("note='\\ud800'", '{"note": "\\\\ud800"}'),
    Case(
        "base",
        "pythonic",
        "[add(note='cut",
        Parts(calls=[("add", '{"note": "cut')], broken=[0]),
    ),
    Case(
        "base",
        "pythonic",
        "[add(a=1, note=open('x'))]",
        Parts("", "open('x'))]", [("add", '{"a": 1, "note": ')], broken=[0]),
    ),
    Case(
        "base", "pythonic", "[add(b=1e999)]", Parts("", "1e999)]", [("add", '{"b": ')], broken=[0])
    ),
    *(
        Case("base", "pythonic", text, Parts(content=text))
        for text in (
            "[1, 2]",
            "[rm(x=1)]",
            "[now",
            "[link](http://x)",
            "now()",
            "Sure: [now()]",
            "<|python_start|>now()",
        )
    ),
]

VALUES = [*SEED, *MINIMAX, *GLM, *MISTRAL, *PYTHON]
