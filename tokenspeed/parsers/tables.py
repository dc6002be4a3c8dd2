"""Parsers by name, and which of them a model gets where no name is given."""

from __future__ import annotations

import functools

from tokenspeed.parsers.formats import ToolFormat
from tokenspeed.parsers.json_calls import HERMES, JSON, LLAMA3
from tokenspeed.parsers.parser import OutputFormat
from tokenspeed.parsers.section_calls import DEEPSEEK31, KIMIK2
from tokenspeed.parsers.thinking import Thinking
from tokenspeed.parsers.xml_calls import QWEN_CODER

AUTO, HARMONY, PASSTHROUGH = "auto", "harmony", "passthrough"

_TAGS = Thinking()
_OPEN_TAGS = Thinking(begins_inside=True)

REASONING: dict[str, Thinking | None] = {
    "base": _TAGS,
    "qwen3": _TAGS,
    "kimi_k25": _TAGS,
    "deepseek_v31": _TAGS,
    "glm45": _TAGS,
    "deepseek_r1": _OPEN_TAGS,
    "qwen3_thinking": _OPEN_TAGS,
    "kimi_thinking": _OPEN_TAGS,
    "step3": _OPEN_TAGS,
    "minimax": _OPEN_TAGS,
    "kimi": Thinking(open="\u25c1think\u25b7", close="\u25c1/think\u25b7"),
    PASSTHROUGH: None,
}

TOOLS: dict[str, ToolFormat | None] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen_coder": QWEN_CODER,
    "kimik2": KIMIK2,
    "deepseek31": DEEPSEEK31,
    "llama3": LLAMA3,
    "json": JSON,
    PASSTHROUGH: None,
}

HARMONY_MODELS = frozenset({"gpt_oss"})
"""Values of `model_type` in config.json whose outputs are harmony, whatever name is given."""

_HARMONY_TEXT = "<|channel|>analysis<|message|>"
REASONING_BY_TEMPLATE = (
    (_HARMONY_TEXT, HARMONY),
    ("\u25c1think\u25b7", "kimi"),
    ("<think>", "base"),
)
TOOLS_BY_TEMPLATE = (
    (_HARMONY_TEXT, HARMONY),
    # Formats of their own that look like one of those below: GLM, Seed-OSS, MiniMax-M3, Apriel.
    *((text, PASSTHROUGH) for text in ("<arg_key>", "<seed:", "]<]minimax[>[", "<tool_calls>[")),
    ("<|tool_calls_section_begin|>", "kimik2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek31"),
    ("<parameter=", "qwen_coder"),
    ("<function=", PASSTHROUGH),  # with JSON inside
    ("<tool_call>", "hermes"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)
"""Text in a chat template -> the parser of what it teaches; the first that is found counts."""


@functools.lru_cache(maxsize=16)
def choose_parsers(
    reasoning: str, tools: str, *, model_type: str = "", template: str = ""
) -> tuple[str, str]:
    """The names that a server's two options stand for; AUTO goes by the model's chat template."""
    if reasoning == AUTO:
        reasoning = _by_template(REASONING_BY_TEMPLATE, template)
    if tools == AUTO:
        tools = _by_template(TOOLS_BY_TEMPLATE, template)
    if model_type in HARMONY_MODELS or HARMONY in (reasoning, tools):
        return HARMONY, HARMONY
    return reasoning, tools


def output_format(reasoning: str, tools: str) -> OutputFormat:
    """The format that two parsers make together. Harmony is both or none."""
    if HARMONY in (reasoning, tools):
        return OutputFormat(is_harmony=True)
    return OutputFormat(thinking=REASONING[reasoning], tools=TOOLS[tools])


def _by_template(table: tuple[tuple[str, str], ...], template: str) -> str:
    return next((name for text, name in table if text in template), PASSTHROUGH)
