"""Outputs as models write them, whole, odd and cut, and what they hold: formats of marks."""

from __future__ import annotations

from parsed import Parts
from recorded_outputs import HERMES, JSON, OSLO, THINKING, WEATHER, Case

BAR, LOW = "\uff5c", "\u2581"


def deepseek(name: str) -> str:
    return f"<{BAR}tool{LOW}{name.replace(' ', LOW)}{BAR}>"


CODER_OSLO = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n"
    "</tool_call>"
)
KIMI_OSLO = (
    f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{OSLO}<|tool_call_end|>"
)
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DEEP_OSLO = f"{deepseek('call begin')}get_weather{deepseek('sep')}{OSLO}{deepseek('call end')}"
DEEP_BEGIN, DEEP_END = deepseek("calls begin"), deepseek("calls end")

CODER = [
    Case("base", "qwen_coder", CODER_OSLO, Parts(calls=[WEATHER])),
    Case(
        "base",
        "qwen_coder",
        f"Yes.\n\n{CODER_OSLO}\n{CODER_OSLO}",
        Parts("", "Yes.", [WEATHER] * 2),
    ),
    Case("base", "qwen_coder", f"<think>\na\n</think>\n\n{CODER_OSLO}", Parts("a", "", [WEATHER])),
    Case("base", "qwen_coder", f"a\n{CODER_OSLO}\n", Parts("a", "", [WEATHER]), is_open=True),
    Case(
        "base",
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n7\n</parameter>\n<parameter=b>\n1.50\n"
        '</parameter>\n<parameter=note>\n123\n</parameter>\n<parameter=tags>\n["x", "\u00e9"]\n'
        "</parameter>\n<parameter=deep>\nNone\n</parameter>\n<parameter=sure>\nTrue\n</parameter>\n"
        "<parameter=other>\n5\n</parameter>\n</function>\n</tool_call>",
        Parts(
            calls=[
                (
                    "add",
                    '{"a": 7, "b": 1.5, "note": "123", "tags": ["x", "\u00e9"], "deep": null, '
                    '"sure": true, "other": "5"}',
                )
            ]
        ),
    ),
    Case(
        "base",
        "qwen_coder",
        "<tool_call><function=add><parameter=a>seven</parameter><parameter=b>NaN</parameter>"
        "<parameter=note></parameter></function></tool_call>",
        Parts(calls=[("add", '{"a": "seven", "b": "NaN", "note": ""}')]),
    ),
    Case("base", "qwen_coder", "<function=now>\n</function>", Parts(calls=[("now", "{}")])),
    Case(
        "base", "qwen_coder", "<tool_call><function=now></tool_call>", Parts(calls=[("now", "{}")])
    ),
    # Code that speaks of the tags itself; line breaks but the outer two are kept.
    Case(
        "base",
        "qwen_coder",
        '<tool_call>\n<function=add>\n<parameter=note>\n\n<parameter=x>\n</parameter> "q" \\\n'
        "</function> <tool_call>\n\n</parameter>\n</function>\n</tool_call>",
        Parts(
            calls=[
                (
                    "add",
                    '{"note": "\\n<parameter=x>\\n</parameter> \\"q\\" \\\\\\n</function> '
                    '<tool_call>\\n"}',
                )
            ]
        ),
    ),
    Case(
        "base",
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=note>\nno end\n</function>\n</tool_call>",
        Parts(calls=[("add", '{"note": "no end"}')]),
    ),
    Case(
        "base",
        "qwen_coder",
        "<function=add><parameter=note>no end</function><function=add><parameter=note>x</function>",
        Parts(calls=[("add", '{"note": "no end"}'), ("add", '{"note": "x"}')]),
    ),
    Case(
        "base",
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=note>\ncut\n",
        Parts(calls=[("add", '{"note": "cut\\n')], broken=[0]),
    ),
    Case(
        "base",
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1",
        Parts(calls=[("add", '{"a": ')], broken=[0]),
    ),
    Case(
        "base",
        "qwen_coder",
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n",
        Parts(calls=[("add", '{"a": 1')], broken=[0]),
    ),
    *(
        Case("base", "qwen_coder", text, Parts(content=text))
        for text in (
            "<tool_call>\n<function=unknown>\n</function>\n</tool_call>",
            "<tool_call>\n<function=add",
            "<tool_call>word</tool_call>",
            f"<function={'x' * 300}>",
        )
    ),
]

SECTIONS = [
    Case(
        "kimi_k25",
        "kimik2",
        f"Look:{KIMI_BEGIN}{KIMI_OSLO}{KIMI_END}",
        Parts("", "Look:", [WEATHER], ["functions.get_weather:0"]),
    ),
    Case(
        "kimi_thinking",
        "kimik2",
        f"a</think>b{KIMI_BEGIN}{KIMI_OSLO}<|tool_call_begin|>my-tool.x:1"
        f"<|tool_call_argument_begin|>{{}}<|tool_call_end|>{KIMI_END}",
        Parts(
            "a",
            "b<|tool_call_begin|>my-tool.x:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            + KIMI_END,
            [WEATHER],
            ["functions.get_weather:0"],
        ),
        is_open=True,
    ),
    Case(
        "kimi_k25",
        "kimik2",
        f"{KIMI_BEGIN}\n{KIMI_OSLO}\n{KIMI_OSLO}\n<|tool_call_begin|>add:4 "
        f'<|tool_call_argument_begin|> {{"a":1}} <|tool_call_end|>\n{KIMI_END}\n',
        Parts(
            calls=[WEATHER, WEATHER, ("add", '{"a":1}')],
            ids=["functions.get_weather:0", "call_0", "add:4"],
        ),
    ),
    Case(
        "kimi_k25",
        "kimik2",
        f"thought {KIMI_BEGIN}{KIMI_OSLO}{KIMI_END}",
        Parts("thought", "", [WEATHER], ["functions.get_weather:0"]),
        is_open=True,
    ),
    Case(
        "kimi_k25",
        "kimik2",
        f"{KIMI_OSLO}<|tool_call_begin|>now<|tool_call_argument_begin|>{{}}{KIMI_END}",
        Parts(calls=[WEATHER, ("now", "{}")], ids=["functions.get_weather:0", "call_0"]),
    ),
    Case(
        "kimi_k25",
        "kimik2",
        f'{KIMI_BEGIN}<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{{"a": 1',
        Parts(calls=[("add", '{"a": 1')], ids=["functions.add:0"], broken=[0]),
    ),
    *(
        Case("kimi_k25", "kimik2", text, Parts(content=text))
        for text in (
            f"{KIMI_BEGIN}{KIMI_END}",
            f"{KIMI_BEGIN}<|tool_call_begin|>functions.now:0",
            f"<|tool_call_begin|>{'x' * 600}<|tool_call_argument_begin|>{{}}",
            "<|tool_call_begin|>now:0<|tool_call_argument_begin|>7<|tool_call_end|>",
        )
    ),
    Case(
        "deepseek_v31",
        "deepseek31",
        f"Hm.{DEEP_BEGIN}{DEEP_OSLO}{DEEP_END}",
        Parts("", "Hm.", [WEATHER]),
    ),
    Case(
        "deepseek_v31",
        "deepseek31",
        f"a</think>{DEEP_BEGIN}{DEEP_OSLO}{DEEP_OSLO}{DEEP_END}b",
        Parts("a", "b", [WEATHER, WEATHER]),
        is_open=True,
    ),
    Case(
        "deepseek_r1",
        "deepseek31",
        f"{DEEP_BEGIN}{deepseek('call begin')}function{deepseek('sep')}get_weather\n```json\n"
        f"{OSLO}\n```{deepseek('call end')}\n{DEEP_OSLO}{DEEP_END}",
        Parts(calls=[WEATHER, WEATHER]),
    ),
    Case(
        "deepseek_r1",
        "deepseek31",
        f"{deepseek('call begin')}function{deepseek('sep')}now{{}}",
        Parts(content=f"{deepseek('call begin')}function{deepseek('sep')}now{{}}"),
    ),
    Case(
        "deepseek_r1",
        "deepseek31",
        f"{deepseek('call begin')}other{deepseek('sep')}now\n```json\n{{}}\n```",
        Parts(content=f"{deepseek('call begin')}other{deepseek('sep')}now\n```json\n{{}}\n```"),
    ),
]

_NEXT = "<|start|>assistant"
HARMONY = [
    Case(
        "harmony",
        "harmony",
        f"<|channel|>analysis<|message|>Hm.<|end|>{_NEXT}<|channel|>final<|message|>Yes.<|return|>",
        Parts("Hm.", "Yes."),
    ),
    Case(
        "harmony",
        "harmony",
        f"<|channel|>analysis<|message|>a<|end|>{_NEXT}<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|call|>",
        Parts("a", "", [WEATHER]),
    ),
    Case(
        "harmony",
        "harmony",
        f" to=functions.get_weather<|channel|>commentary json<|message|>{OSLO}",
        Parts(calls=[WEATHER]),
    ),
    Case(
        "harmony",
        "harmony",
        f"<|channel|>commentary<|message|>First.<|end|>{_NEXT} to=functions.now<|channel|>"
        f"commentary<|message|>{{}}<|call|>{_NEXT}<|channel|>analysis to=functions.get_weather code"
        f"<|message|>{OSLO}<|call|>",
        Parts("", "First.", [("now", "{}"), WEATHER]),
    ),
    Case(
        "harmony",
        "harmony",
        f"<|channel|>analysis<|message|>a<|end|>{_NEXT}<|channel|>analysis<|message|>b<|channel|>"
        "final<|message|>c<|start|>assistant<|channel|>final<|message|>d",
        Parts("a\nb", "c\nd"),
    ),
    Case(
        "harmony",
        "harmony",
        "<|channel|>strange words <|constrain|>here<|message|>text<|end|>",
        Parts(content="text"),
    ),
    Case("harmony", "harmony", "no header at all<|return|>", Parts(content="no header at all")),
    Case("harmony", "harmony", "<|channel|>analysis<|message|>cut", Parts("cut")),
    Case("harmony", "harmony", "<|channel|>analysis<|message|>a<|end|><|start|>assis", Parts("a")),
    Case(
        "harmony",
        "harmony",
        f"<|channel|>{'x' * 600}<|message|>a",
        Parts(content=f"<|channel|>{'x' * 600}<|message|>a"),
    ),
    Case(
        "harmony",
        "harmony",
        '<|channel|>commentary to=functions.add<|message|>{"a": 1',
        Parts(calls=[("add", '{"a": 1')], broken=[0]),
    ),
    Case(
        "harmony",
        "harmony",
        '<|channel|>commentary to=functions.unknown<|message|>{"a": 1}<|call|>',
        Parts(content='{"a": 1}'),
    ),
    Case(
        "harmony",
        "harmony",
        "<|channel|>commentary to=functions.now<|message|>oops<|call|>",
        Parts(content="oops"),
    ),
]

CASES = [*THINKING, *HERMES, *CODER, *SECTIONS, *JSON, *HARMONY]
