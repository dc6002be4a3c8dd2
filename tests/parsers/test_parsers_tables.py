"""Which parser a model gets, and where its reasoning begins."""

from __future__ import annotations

import itertools

import pytest
from parsed import parse, parts_of

from tokenspeed.config import OutputConfig
from tokenspeed.options import options_of
from tokenspeed.parsers import harmony
from tokenspeed.parsers.tables import (
    AUTO,
    BY_MODEL_TYPE,
    HARMONY,
    HARMONY_MODELS,
    REASONING,
    TOOLS,
    choose_parsers,
    output_format,
)

TEMPLATES = [
    ("{{ '<think>\\n' }}{{ '<tool_call>' }}", "base", "hermes"),
    ("<tool_call>\n<function=example>\n<parameter=a><think>", "base", "qwen_coder"),
    ("<function=example>{}</function><|python_tag|>", "passthrough", "passthrough"),
    ("<seed:think><seed:tool_call><function=example><parameter=a>", "seed_oss", "seed_oss"),
    ('<think><minimax:tool_call><invoke name="', "base", "minimax_m2"),
    ("[THINK][TOOL_CALLS]{{ name }}[ARGS]", "mistral", "mistral_args"),
    ("[TOOL_CALLS][", "passthrough", "mistral"),
    ("[func_name1(params_name1=params_value1)]<|python_tag|>", "passthrough", "pythonic"),
    ("<|tool_calls_section_begin|><think></think>", "base", "kimik2"),
    ("<\uff5ctool\u2581calls\u2581begin\uff5c>", "passthrough", "deepseek31"),
    ("{%- if builtin_tools %}<|python_tag|>", "passthrough", "llama3"),
    ('"parameters": dictionary of argument name and its value', "passthrough", "llama3"),
    ("<tool_call>{name}\n<arg_key>k</arg_key> <think>", "base", "glm45"),
    ("<|channel|>analysis<|message|>", HARMONY, HARMONY),
    ("\u25c1think\u25b7", "kimi", "passthrough"),
    ("<|im_start|>{{ message.content }}", "passthrough", "passthrough"),
    ("", "passthrough", "passthrough"),
]


@pytest.mark.parametrize(("template", "reasoning", "tools"), TEMPLATES)
def test_auto_goes_by_the_template(template: str, reasoning: str, tools: str) -> None:
    assert choose_parsers("auto", "auto", template=template) == (reasoning, tools)
    named = ("qwen3_thinking", "json")
    assert choose_parsers(*named, template="<think> <tool_call>") == named
    form = output_format(reasoning, tools)
    assert form.is_harmony == (HARMONY in (reasoning, tools))
    if not form.is_harmony:
        assert (form.thinking, form.tools) == (REASONING[reasoning], TOOLS[tools])


def test_gpt_oss_is_harmony_whatever_is_named() -> None:
    for model, reasoning, tools in itertools.product(
        HARMONY_MODELS, ["auto", "base", "passthrough"], ["auto", "passthrough"]
    ):
        assert choose_parsers(reasoning, tools, model_type=model) == (HARMONY, HARMONY)
    assert choose_parsers(HARMONY, "auto") == (HARMONY, HARMONY)


def test_where_the_template_shows_nothing_the_family_counts() -> None:
    assert BY_MODEL_TYPE.keys().isdisjoint(HARMONY_MODELS)
    for model, names in BY_MODEL_TYPE.items():
        output_format(*names)  # there are such parsers
        assert choose_parsers("auto", "auto", model_type=model, template="{{ tools }}") == names
        assert choose_parsers("auto", "json", model_type=model, template="{{ x }}")[1] == "json"
        shown = choose_parsers("auto", "auto", model_type=model, template="<tool_call>")
        assert shown == ("passthrough", "hermes")
        assert choose_parsers("auto", "auto", model_type=model) == ("passthrough", "passthrough")


@pytest.mark.parametrize("name", sorted(REASONING))
def test_the_prompts_end_says_whether_reasoning_is_open(name: str) -> None:
    thinking = REASONING[name]
    form = output_format(name, "passthrough")
    if thinking is None:
        assert not form.is_open("<think>")
        return
    opened, closed = thinking.open, thinking.close
    assert form.is_open(f"<|im_start|>assistant\n{opened}\n")
    assert not form.is_open(f"<|im_start|>assistant\n{opened}\n\n{closed}\n\n")
    assert form.is_open(f"what does {opened} mean?\nassistant\n") == thinking.begins_inside
    assert form.is_open("") == thinking.begins_inside
    assert thinking.goes_on(f"{opened}a")
    assert not thinking.goes_on(f"{opened}a{closed}b") and not thinking.goes_on("b")
    parts = parts_of(parse(form, f"a{closed}b", is_open=True))
    assert (parts.reasoning, parts.content) == ("a", "b")


def test_the_options_name_every_parser() -> None:
    names = {each.name: set(each.choices) for each in options_of(OutputConfig)}
    assert names["reasoning_parser"] == {AUTO, HARMONY, *REASONING}
    assert names["tool_call_parser"] == {AUTO, HARMONY, *TOOLS}


def test_marks_are_named() -> None:
    """What a server has to keep of special tokens."""
    assert output_format("base", "passthrough").markers == {"<think>", "</think>"}
    assert output_format(HARMONY, HARMONY).markers == set(harmony.MARKERS)
    assert output_format("passthrough", "passthrough").markers == set()
    kimi = output_format("kimi_k25", "kimik2").markers
    assert {"<think>", "<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"} <= kimi
