"""Tools and reasoning in the requests of chat: what is taken, refused, and put into the prompt."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import CHAT, CHATML, TOKENIZER, refused
from tool_fakes import HERMES_CALL, OPENING, OSLO, QWEN, TOOLS, as_folded, asking

from tokenspeed.text.template_file import SHIPPED

MESSAGES = [{"role": "user", "content": "Hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "now", "arguments": "{}"}}
BAD_TOOLS: list[tuple[Any, str]] = [
    ([1], "tools[0]"),
    ([{"type": "function"}], "tools[0]"),
    ([{"type": "web_search"}], "tools[0]"),
    ([{"type": "function", "function": {"name": "a b"}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": ""}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": 7}}], "tools[0].function.name"),
    ([{"type": "function", "function": {"name": "x" * 129}}], "tools[0].function.name"),
    (
        [{"type": "function", "function": {"name": "a", "parameters": []}}],
        "tools[0].function.parameters",
    ),
    (
        [{"type": "function", "function": {"name": "a", "description": 1}}],
        "tools[0].function.description",
    ),
    ([{"type": "function", "function": {"name": "a", "strict": 1}}], "tools[0].function.strict"),
    ([TOOLS[0], TOOLS[0]], "tools[1]"),
    ([TOOLS[0]] * 513, "tools"),
    ({}, "tools"),
]


@pytest.mark.parametrize(("tools", "param"), BAD_TOOLS, ids=lambda value: str(value)[:30])
async def test_bad_tools_name_their_place(tools: Any, param: str) -> None:
    async with asking(template=QWEN) as ask:
        assert refused(await ask.chat(tools=tools))["param"] == param


@pytest.mark.parametrize(
    ("choice", "tools", "code"),
    [
        ({"type": "allowed_tools", "allowed_tools": {}}, TOOLS, "unsupported_parameter"),
        ({"type": "function", "function": {"name": "other"}}, TOOLS, None),
        ({"type": "function"}, TOOLS, None),
        ({"type": "x"}, TOOLS, None),
        ("sometimes", TOOLS, None),
        (7, TOOLS, None),
        ("required", [], None),
        ("required", None, None),
    ],
)
async def test_choices_that_cannot_be_met(choice: Any, tools: Any, code: str | None) -> None:
    async with asking(template=QWEN) as ask:
        error = refused(await ask.chat(tools=tools, tool_choice=choice))
        assert (error["param"], error["code"]) == ("tool_choice", code)
        assert (await ask.chat(tools=tools, tool_choice="auto")).status_code == 200


async def test_tools_that_this_model_cannot_call_are_refused() -> None:
    odd = QWEN.replace("<tool_call></tool_call>", "]<]minimax[>[")
    async with asking(template=odd) as ask:
        error = refused(await ask.chat(tools=TOOLS))
        assert error["param"] == "tools" and "--tool-call-parser" in error["message"]
    async with asking(template=odd, tool_call_parser="passthrough") as ask:
        ask.engine.answers = {0: HERMES_CALL}
        assert as_folded(await ask.chat(tools=TOOLS))["content"] == HERMES_CALL
    async with asking(template=CHATML) as ask:
        error = refused(await ask.chat(tools=TOOLS))
        assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")
        assert "no place" in error["message"] and "--chat-template hermes" in error["message"]
        called = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [CALL]}]
        assert "no place for tool calls" in refused(await ask.chat(messages=called))["message"]


async def test_tools_get_a_template_of_their_own() -> None:
    """With it come its parsers; chats without tools know nothing of either."""
    async with asking(template=CHATML, tool_template=SHIPPED["hermes"].read_text()) as ask:
        for fields, num_calls in (
            ({}, 0),
            ({"tools": []}, 0),
            ({"tools": TOOLS, "tool_choice": "none"}, 0),
            ({"tools": TOOLS}, 1),
            ({"tools": TOOLS, "tool_choice": "required"}, 1),
        ):
            ask.engine.answers = {0: HERMES_CALL}
            whole = as_folded(await ask.chat(**fields))
            assert (len(whole["calls"]), bool(whole["content"])) == (num_calls, not num_calls)
            prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids, skip_special_tokens=False)
            plain = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            assert prompt == plain if not num_calls else "<tools>" in prompt
        rendered = await ask.http.post(f"{CHAT}/render", json={**fields, "messages": MESSAGES})
        assert "<tools>" in rendered.json()["prompts"][0]["text"]


SWITCHED = QWEN  # reads enable_thinking
ALWAYS = OPENING.replace("enable_thinking", "other")  # reasons, and has no switch
KWARGS: list[tuple[str, dict[str, Any], str | None]] = [
    (CHATML, {"enable_thinking": False}, None),
    (CHATML, {"thinking": False, "reasoning_effort": "none"}, None),
    (CHATML, {"enable_thinking": None}, None),
    (CHATML, {"enable_thinking": True}, "enable_thinking"),
    (CHATML, {"reasoning_effort": "high"}, "reasoning_effort"),
    (CHATML, {"other": 1}, "other"),
    (CHATML, {"messages": "x"}, "messages"),
    (ALWAYS, {"enable_thinking": True}, None),
    (ALWAYS, {"reasoning_effort": "low"}, None),
    (ALWAYS, {"enable_thinking": False}, "enable_thinking"),
    (SWITCHED, {"enable_thinking": False}, None),
    (SWITCHED, {"enable_thinking": True}, None),
    (SWITCHED, {"thinking": True}, "thinking"),
    (SWITCHED, {"thinking": False}, "thinking"),
    (SWITCHED, {"eos_token": "x"}, "eos_token"),
]


@pytest.mark.parametrize(("template", "kwargs", "refuses"), KWARGS)
async def test_variables_that_the_template_does_not_read_are_refused(
    template: str, kwargs: dict[str, Any], refuses: str | None
) -> None:
    """Unless they ask for what is so anyway: then there is nothing to drop."""
    async with asking(template=template) as ask:
        answer = await ask.chat(chat_template_kwargs=kwargs)
        if refuses is None:
            assert answer.status_code == 200, answer.text
            return
        error = refused(answer)
        assert error["param"] == "chat_template_kwargs" and repr(refuses) in error["message"]
        assert error["code"] == "unsupported_parameter"


async def test_a_turn_with_calls_goes_back_into_the_prompt() -> None:
    async with asking(template=QWEN) as ask:
        ask.engine.answers = {0: HERMES_CALL}
        message = (await ask.chat(tools=TOOLS)).json()["choices"][0]["message"]
        assert message["content"] is None
        call_id = message["tool_calls"][0]["id"]
        messages = [
            {"role": "user", "content": "Hi"},
            message,
            {"role": "tool", "tool_call_id": call_id, "content": "rain"},
        ]
        ask.engine.answers = {0: "It rains."}
        assert as_folded(await ask.chat(messages=messages, tools=TOOLS))["content"] == "It rains."
        prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids, skip_special_tokens=False)
        assert f'<tool_call>{{"name": "get_weather", "arguments": {OSLO}}}</tool_call>' in prompt
        assert "<|im_start|>tool\nrain<|im_end|>" in prompt and '"name": "now"' in prompt


async def test_reasoning_effort_means_what_the_template_reads() -> None:
    levels = "{{ 'Effort ' ~ reasoning_effort | default('?') }}" + QWEN
    async with asking(template=levels) as ask:
        for fields, effort in (
            ({}, "?"),
            ({"reasoning_effort": "low"}, "low"),
            ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "x"}}, "x"),
        ):
            await ask.chat(**fields)
            prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids)
            assert prompt.startswith(f"Effort {effort}")
        for bad in ("huge", ""):
            assert refused(await ask.chat(reasoning_effort=bad))["param"] == "reasoning_effort"
    async with asking(template=QWEN) as ask:
        for fields, is_off in (
            ({"reasoning_effort": "none"}, True),
            ({"reasoning_effort": "high"}, False),
            ({"chat_template_kwargs": {"enable_thinking": False}}, True),
        ):
            ask.engine.answers = {0: "</think> is a tag"}
            whole = as_folded(await ask.chat(**fields))
            assert whole["content"] == "</think> is a tag"
            prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids)
            assert prompt.endswith("</think>\n\n") == is_off
    async with asking(template=CHATML) as ask:
        assert (await ask.chat(reasoning_effort="none")).status_code == 200
        error = refused(await ask.chat(reasoning_effort="low"))
        assert (error["param"], error["code"]) == ("reasoning_effort", "unsupported_parameter")
    async with asking(template="<think>" + CHATML) as ask:  # which cannot be switched off
        assert refused(await ask.chat(reasoning_effort="none"))["param"] == "reasoning_effort"


@pytest.mark.parametrize(
    ("said", "reasoning", "content"),
    [("<think>I am ", "rest", "b"), ("<think>a</think>I am ", "", "rest</think>b")],
)
async def test_a_continued_message_goes_on_where_it_is(
    said: str, reasoning: str, content: str
) -> None:
    async with asking(template=QWEN, reasoning_parser="deepseek_r1") as ask:
        ask.engine.answers = {0: "rest</think>b"}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [{"type": "text", "text": said}]},
        ]
        whole = as_folded(await ask.chat(messages=messages, continue_final_message=True))
        assert (whole["reasoning_content"], whole["content"]) == (reasoning, content)


async def test_only_chat_has_tools() -> None:
    async with asking(template=QWEN) as ask:
        for name, value in (("tools", TOOLS), ("tool_choice", "auto"), ("reasoning_effort", "low")):
            error = refused(await ask.completion(**{name: value}))
            assert (error["param"], error["code"]) == (name, "unsupported_parameter")


async def test_a_form_begins_behind_reasoning() -> None:
    """Where the prompt has opened it and its end is a token; else at once, and all is content."""
    fields = {"response_format": {"type": "json_object"}}
    kimi = OPENING.replace("<think>", "\u25c1think\u25b7")
    for template, text, reasoning, content, waits in (
        (OPENING, "a</think>{}", "a", "{}", True),
        (kimi, "{}", "", "{}", False),
        (QWEN, "{}", "", "{}", False),
    ):
        async with asking(template=template) as ask:
            ask.engine.answers = {0: text}
            whole = as_folded(await ask.chat(**fields))
            assert (whole["reasoning_content"], whole["content"]) == (reasoning, content)
            asked = ask.engine.requests[-1].params.structured_outputs
            assert asked is not None and asked.json_object
            mark = TOKENIZER.encode("</think>", add_special_tokens=False)
            assert list(asked.reasoning_end) == (mark if waits else [])


async def test_reasoning_can_stay_in_the_content() -> None:
    async with asking(template=QWEN) as ask:
        text = f"<think>a</think>b\n{HERMES_CALL}"
        ask.engine.answers = {0: text}
        whole = as_folded(await ask.chat(tools=TOOLS, separate_reasoning=False))
        assert (whole["reasoning_content"], whole["content"]) == ("", "<think>a</think>b")
        assert len(whole["calls"]) == 1
    async with asking(template=QWEN, model_type="gpt_oss") as ask:
        assert refused(await ask.chat(separate_reasoning=False))["param"] == "separate_reasoning"
