"""Parsers by name, and which of them a model gets where no name is given."""

from __future__ import annotations

import functools

from tokenspeed.parsers.formats import ToolFormat
from tokenspeed.parsers.glm_calls import GLM45
from tokenspeed.parsers.json_calls import HERMES, JSON, LLAMA3
from tokenspeed.parsers.mistral_calls import MISTRAL, MISTRAL_ARGS
from tokenspeed.parsers.parser import OutputFormat
from tokenspeed.parsers.python_calls import PYTHONIC
from tokenspeed.parsers.section_calls import DEEPSEEK31, KIMIK2
from tokenspeed.parsers.thinking import Thinking
from tokenspeed.parsers.xml_calls import MINIMAX_M2, QWEN_CODER, SEED_OSS

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
    "mistral": Thinking(open="[THINK]", close="[/THINK]"),
    "seed_oss": Thinking(open="<seed:think>", close="</seed:think>"),
    "kimi": Thinking(open="\u25c1think\u25b7", close="\u25c1/think\u25b7"),
    PASSTHROUGH: None,
}

TOOLS: dict[str, ToolFormat | None] = {
    "hermes": HERMES,
    "qwen": HERMES,
    "qwen_coder": QWEN_CODER,
    "seed_oss": SEED_OSS,
    "minimax_m2": MINIMAX_M2,
    "glm45": GLM45,
    "kimik2": KIMIK2,
    "deepseek31": DEEPSEEK31,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "llama3": LLAMA3,
    "pythonic": PYTHONIC,
    "json": JSON,
    PASSTHROUGH: None,
}

HARMONY_MODELS = frozenset({"gpt_oss"})
"""Values of `model_type` in config.json whose outputs are harmony, whatever name is given."""

_HARMONY_TEXT = "<|channel|>analysis<|message|>"
REASONING_BY_TEMPLATE = (
    (_HARMONY_TEXT, HARMONY),
    ("\u25c1think\u25b7", "kimi"),
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("<think>", "base"),
)
TOOLS_BY_TEMPLATE = (
    (_HARMONY_TEXT, HARMONY),
    # Formats of their own that look like one of those below: MiniMax-M3, Apriel.
    *((text, PASSTHROUGH) for text in ("]<]minimax[>[", "<tool_calls>[")),
    ("<minimax:tool_call>", "minimax_m2"),
    ("<seed:tool_call>", "seed_oss"),
    ("<arg_key>", "glm45"),
    ("<|tool_calls_section_begin|>", "kimik2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "deepseek31"),
    ("<parameter=", "qwen_coder"),
    ("<function=", PASSTHROUGH),  # with JSON inside
    ("<tool_call>", "hermes"),
    ("[ARGS]", "mistral_args"),
    ("[TOOL_CALLS]", "mistral"),
    ("[func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3"),
    ('"parameters": dictionary of argument name', "llama3"),
)
"""Text in a chat template -> the parser of what it teaches; the first that is found counts."""

BY_MODEL_TYPE = {
    **dict.fromkeys(("glm4_moe", "glm4_moe_lite"), ("glm45", "glm45")),
    **dict.fromkeys(("mistral", "mistral3", "ministral3"), (PASSTHROUGH, "mistral")),
    **dict.fromkeys(("llama4", "llama4_text"), (PASSTHROUGH, "pythonic")),
    "minimax_m2": ("minimax", "minimax_m2"),
    "seed_oss": ("seed_oss", "seed_oss"),
    "kimi_k2": (PASSTHROUGH, "kimik2"),
}
"""`model_type` in config.json -> both parsers, where the template shows nothing."""


@functools.lru_cache(maxsize=16)
def choose_parsers(
    reasoning: str, tools: str, *, model_type: str = "", template: str = ""
) -> tuple[str, str]:
    """The names that the two options stand for; AUTO goes by the model's chat template, and where
    that shows no calls, by its family.
    """
    shown = _by_template(REASONING_BY_TEMPLATE, template), _by_template(TOOLS_BY_TEMPLATE, template)
    if shown == (PASSTHROUGH, PASSTHROUGH) and template:
        shown = BY_MODEL_TYPE.get(model_type, shown)
    reasoning = shown[0] if reasoning == AUTO else reasoning
    tools = shown[1] if tools == AUTO else tools
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
