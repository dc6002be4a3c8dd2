"""Outputs as models write them, whole, odd and cut, and what they hold: think tags and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

from parsed import Parts


@dataclass
class Case:
    """`is_open`: the prompt has opened the reasoning."""

    reasoning: str
    tools: str
    text: str
    parts: Parts = field(default_factory=Parts)
    is_open: bool = False


OSLO = '{"city": "Oslo"}'
HERMES_OSLO = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
WEATHER = ("get_weather", OSLO)

THINKING = [
    Case("base", "hermes", "Hello there.\n", Parts(content="Hello there.\n")),
    Case(
        "base",
        "hermes",
        "  leading and trailing \n\n",
        Parts(content="  leading and trailing \n\n"),
    ),
    Case("base", "hermes", "", Parts()),
    Case("base", "hermes", " \n", Parts(content=" \n")),
    Case("qwen3", "hermes", "<think>\nHm.\n\nSo.\n</think>\n\nYes.", Parts("Hm.\n\nSo.", "Yes.")),
    Case("qwen3", "hermes", "<think>\n\n</think>\n\nYes.", Parts(content="Yes.")),
    Case("base", "hermes", "\n<think>a</think>b", Parts("a", "b")),
    Case("base", "hermes", "<think>a<think>b</think>c</think>d", Parts("a<think>b", "c</think>d")),
    Case("base", "hermes", "Use <think> and </think>.", Parts(content="Use <think> and </think>.")),
    Case("base", "hermes", "<think>never closed <thi", Parts("never closed <thi")),
    Case("base", "hermes", "<think>cut </think", Parts("cut </think")),
    Case("base", "hermes", "<thin", Parts(content="<thin")),
    Case("base", "hermes", "<think", Parts(content="<think")),
    Case("deepseek_r1", "passthrough", "still\n</think>\nYes", Parts("still", "Yes"), is_open=True),
    Case(
        "deepseek_r1", "passthrough", "<think>still</think>Yes", Parts("still", "Yes"), is_open=True
    ),
    Case(
        "minimax",
        "passthrough",
        "cut \u00e9\U0001fae0",
        Parts("cut \u00e9\U0001fae0"),
        is_open=True,
    ),
    Case("kimi", "hermes", "\u25c1think\u25b7a\u25c1/think\u25b7b", Parts("a", "b")),
    Case("passthrough", "hermes", "<think>a</think>b", Parts(content="<think>a</think>b")),
    Case("base", "passthrough", f"<think>a</think>{HERMES_OSLO}", Parts("a", HERMES_OSLO)),
]

HERMES = [
    Case("base", "hermes", HERMES_OSLO, Parts(calls=[WEATHER])),
    Case("base", "hermes", f"Let me see. \n{HERMES_OSLO}", Parts("", "Let me see.", [WEATHER])),
    Case("base", "hermes", f"{HERMES_OSLO}\n{HERMES_OSLO}", Parts(calls=[WEATHER, WEATHER])),
    Case("base", "hermes", f"{HERMES_OSLO}\nDone.", Parts("", "Done.", [WEATHER])),
    Case("qwen3", "qwen", f"<think>\nx\n</think>\n\n{HERMES_OSLO}", Parts("x", "", [WEATHER])),
    Case(
        "base",
        "hermes",
        '<tool_call>{"name":"add","arguments":'
        '{"note":"</tool_call> \\" <tool_call> \\u00e9 \u00e9"}}</tool_call>',
        Parts(calls=[("add", '{"note":"</tool_call> \\" <tool_call> \\u00e9 \u00e9"}')]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"arguments": {"a": [1, {"b": null}]}, "name": "add"}</tool_call>',
        Parts(calls=[("add", '{"a": [1, {"b": null}]}')]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"type": "function", "name": "now"}</tool_call>',
        Parts(calls=[("now", "{}")]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"name": "now", "arguments": null}'
        '{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        Parts(calls=[("now", "{}"), ("add", '{"a": 1}')]),
    ),
    # Slips that can mean one thing only are mended.
    Case(
        "base",
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"note": "a\nb\t\\d", "sure": True, "x": None}}'
        "</tool_call>",
        Parts(calls=[("add", '{"note": "a\\nb\\t\\\\d", "sure": true, "x": null}')]),
    ),
    # No calls: content, to the character.
    *(
        Case("base", "hermes", text, Parts(content=text))
        for text in (
            '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
            '<tool_call>{"name": "now", "arguments": [1]}</tool_call>',
            '<tool_call>{"name": "now", "arguments": "[1]"}</tool_call>',
            '<tool_call>{"name": "now", "arguments": "\\ud800"}</tool_call>',
            '<tool_call>{"name": 7}</tool_call>',
            '<tool_call>{"name": "now", "answer": 42}</tool_call>',
            "<tool_call>nothing of the kind</tool_call>",
            '<tool_call>{"name": "get_wea',
            "<tool_call>",
            "<tool_ca",
            "a </tool_call> b",
            '{"name": "now", "arguments": {}}',
        )
    ),
    Case(
        "base",
        "hermes",
        f"<tool_call>oh <tool_call>{{ {HERMES_OSLO}",
        Parts("", "<tool_call>oh <tool_call>{", [WEATHER]),
    ),
    # A call that breaks off cannot be taken back: the rest is content.
    Case(
        "base",
        "hermes",
        f'<tool_call>{{"name": "add", "arguments": {{"a": \'{HERMES_OSLO}',
        Parts("", "'", [("add", '{"a": '), WEATHER], broken=[0]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": \'x\'}}</tool_call>',
        Parts("", "'x'}}</tool_call>", [("add", '{"a": ')], broken=[0]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"a": 1, "note": "long tex',
        Parts(calls=[("add", '{"a": 1, "note": "long tex')], broken=[0]),
    ),
    Case(
        "base",
        "hermes",
        '<tool_call>{"name": "add", "arguments": {"sure": tr',
        Parts(calls=[("add", '{"sure": tr')], broken=[0]),
    ),
    Case(
        "base",
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {OSLO}',
        Parts(calls=[WEATHER]),
    ),
    # Inside reasoning a call is a thought, unless the output ends with it.
    Case(
        "base",
        "hermes",
        f"<think>I could {HERMES_OSLO} now.</think>No.",
        Parts(f"I could {HERMES_OSLO} now.", "No."),
    ),
    Case(
        "base", "hermes", f"<think>Hm {HERMES_OSLO}</think>No.", Parts(f"Hm {HERMES_OSLO}", "No.")
    ),
    Case(
        "qwen3_thinking",
        "hermes",
        f"Tags like <tool_call> help. {HERMES_OSLO}\n{HERMES_OSLO}\n",
        Parts("Tags like <tool_call> help.", "", [WEATHER, WEATHER]),
        is_open=True,
    ),
    Case("base", "hermes", f"<think>a {HERMES_OSLO[:-3]}", Parts(f"a {HERMES_OSLO[:-3]}")),
]

JSON = [
    Case(
        "base",
        "llama3",
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
        Parts(calls=[WEATHER]),
    ),
    Case(
        "base",
        "llama3",
        f'\n<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {OSLO}}}; '
        '{"name": "now", "parameters": {}}\n{"name": "now"}',
        Parts(calls=[WEATHER, ("now", "{}"), ("now", "{}")]),
    ),
    Case("base", "llama3", "Sure. {not json}", Parts(content="Sure. {not json}")),
    Case("base", "llama3", ' {"answer": 42}', Parts(content=' {"answer": 42}')),
    Case(
        "base",
        "llama3",
        '{"name": "now"}; and so on',
        Parts("", "and so on", [("now", "{}")]),
    ),
    Case(
        "base",
        "json",
        f' [{{"name": "now", "arguments": {{}}}}, {{"name": "get_weather", "arguments": {OSLO}}}] ',
        Parts(calls=[("now", "{}"), WEATHER]),
    ),
    Case("base", "json", '{"name": "now"}', Parts(calls=[("now", "{}")])),
    *(
        Case("base", "json", text, Parts(content=text))
        for text in ("[1, 2]", '[{"name": "unknown"}]', 'So: {"name": "now"}', "{", "[", '{"name"')
    ),
    Case("base", "json", '<think>a</think>\n{"name": "now"}', Parts("a", "", [("now", "{}")])),
]
