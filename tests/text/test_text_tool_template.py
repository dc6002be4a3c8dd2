"""The chat template of this package, which has a place for tools: who gets it, what it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from tokenspeed.config import ModelConfig
from tokenspeed.request import InvalidRequest
from tokenspeed.text.chat import ChatTemplate
from tokenspeed.text.template_file import SHIPPED, named_template
from tokenspeed.text.text_side import TextSide, load_text_side

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'Says "how it is" <outside> \u00e9',
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = {"name": "weather", "arguments": '{"city": "Oslo \u00e9"}'}


def call(number: int) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": CALL}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": text}


USER = {"role": "user", "content": "Oslo?"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one turn": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "developer": [{"role": "developer", "content": "Be brief."}, USER],
    "empty system": [{"role": "system", "content": ""}, USER],
    "turns": [USER, {"role": "assistant", "content": "Yes. "}, USER],
    "late system": [USER, {"role": "system", "content": "Be kind."}, USER],
    "call": [USER, {"role": "assistant", "content": None, "tool_calls": [call(0)]}, result(0, "1")],
    "text and calls": [
        USER,
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call(0), call(1)]},
        result(0, "rain"),
        result(1, "sun"),
        {"role": "assistant", "content": "It rains."},
        USER,
    ],
}
TOOLS_TURN = (
    "You can call functions. Each line here describes one, as JSON:\n<tools>\n"
    '{"type": "function", "function": {"name": "weather", "description": '
    '"Says \\"how it is\\" <outside> \u00e9", "parameters": {"type": "object", "properties": '
    '{"city": {"type": "string"}}}}}\n</tools>\n\n'
    "To call a function, write its name and its arguments as one JSON object in tags:\n"
    '<tool_call>\n{"name": FUNCTION, "arguments": {NAME: VALUE}}\n</tool_call><|im_end|>\n'
)
CALL_TEXT = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo \u00e9"}}\n</tool_call>'
ASKED, ANSWER = "<|im_start|>user\nOslo?<|im_end|>\n", "<|im_start|>assistant\n"
GOLDEN = {
    "one turn": ("", ASKED),
    "system": ("Be brief.\n\n", ASKED),
    "developer": ("Be brief.\n\n", ASKED),
    "empty system": ("", ASKED),
    "turns": ("", f"{ASKED}{ANSWER}Yes. <|im_end|>\n{ASKED}"),
    "late system": ("", f"{ASKED}<|im_start|>system\nBe kind.<|im_end|>\n{ASKED}"),
    "call": (
        "",
        f"{ASKED}{ANSWER}{CALL_TEXT}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\n1\n</tool_response><|im_end|>\n",
    ),
    "text and calls": (
        "",
        f"{ASKED}{ANSWER}Let me see.\n{CALL_TEXT}\n{CALL_TEXT}<|im_end|>\n<|im_start|>tool\n"
        "<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response>"
        f"<|im_end|>\n{ANSWER}It rains.<|im_end|>\n{ASKED}",
    ),
}


@pytest.fixture(scope="module")
def hermes() -> ChatTemplate:
    return ChatTemplate(named_template("hermes"))


@pytest.fixture(scope="module")
def bundled(smollm2_source: Any) -> TextSide:
    return load_text_side(ModelConfig())


@pytest.mark.parametrize("name", CHATS)
def test_golden_prompts_with_tools(hermes: ChatTemplate, name: str) -> None:
    system, rest = GOLDEN[name]
    expected = f"<|im_start|>system\n{system}{TOOLS_TURN}{rest}{ANSWER}"
    assert hermes.render(CHATS[name], tools=[WEATHER]) == expected
    without = hermes.render(CHATS[name])
    has_system = CHATS[name][0]["role"] in ("system", "developer")
    text = system.removesuffix("\n\n")
    head = f"<|im_start|>system\n{text}<|im_end|>\n" if has_system else ""
    assert without == f"{head}{rest}{ANSWER}"


def test_transformers_renders_it_alike(hermes: ChatTemplate) -> None:
    for name, chat in CHATS.items():
        if name == "developer":
            continue
        given = [{**each, "content": each["content"] or ""} for each in chat]
        for each in given:
            for made in each.get("tool_calls", ()):
                made["function"] = {**CALL, "arguments": json.loads(CALL["arguments"])}
        [text], _ = render_jinja_template(
            [given], chat_template=hermes.source, tools=[WEATHER], add_generation_prompt=True
        )
        assert text == hermes.render(chat, tools=[WEATHER])


def test_the_bundled_model_gets_it_for_tools_alone(bundled: TextSide, golden: Any) -> None:
    """Everything else is rendered by its own template, to the byte."""

    def prompt(messages: list[Any], tools: list[Any] | None = None) -> tuple[str, list[int]]:
        return bundled.chat_prompt(
            messages,
            tools=tools,
            kwargs=None,
            add_generation_prompt=True,
            continue_final_message=False,
        )

    for each in golden["prompts"]:
        for tools in (None, []):
            assert prompt(each["messages"], tools) == (each["rendered"], each["prompt_ids"])
    own = ChatTemplate(bundled.template.source, bundled.template._special_tokens)
    assert bundled.tokenizer is not None
    assert bundled.template.source == bundled.tokenizer.chat_template
    for name, chat in CHATS.items():
        expected = f"<|im_start|>system\n{GOLDEN[name][0]}{TOOLS_TURN}{GOLDEN[name][1]}{ANSWER}"
        assert prompt(chat, [WEATHER])[0] == expected
        if "call" in name:  # a turn that the own template would leave out
            assert CALL_TEXT in prompt(chat)[0]
            with pytest.raises(InvalidRequest, match=r"no place for tool calls.*--chat-template"):
                own.render(chat)
        else:
            assert prompt(chat)[0] == own.render(chat)


def test_an_operators_template_is_the_only_one(smollm2_source: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    mine = load_text_side(ModelConfig(chat_template=str(file)))
    assert mine.template_for([USER], [WEATHER]) is mine.template
    with pytest.raises(InvalidRequest, match=r"--chat-template hermes is one for models that"):
        mine.template.render([USER], tools=[WEATHER])
    named = load_text_side(ModelConfig(chat_template="hermes"))
    assert named.template.source == SHIPPED["hermes"].read_text()
    assert named.template_for([USER], None) is named.template


def test_a_final_message_is_continued_in_it(hermes: ChatTemplate) -> None:
    text = hermes.render(
        [USER, {"role": "assistant", "content": "It is "}],
        tools=[WEATHER],
        add_generation_prompt=False,
        continue_final_message=True,
    )
    assert text.endswith(f"{ASKED}{ANSWER}It is ")
