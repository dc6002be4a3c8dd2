"""Tools and reasoning in the answers of chat: streamed and not, whatever the cut of the text."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from server_fakes import CHATML, TOKENIZER
from test_server_text import events
from tool_fakes import (
    CODER,
    CODER_CALL,
    HERMES_CALL,
    KIMI,
    KIMI_CALL,
    OPENING,
    OSLO,
    QWEN,
    TOOLS,
    as_folded,
    asking,
    folded,
)

GRID: dict[str, tuple[dict[str, Any], str, tuple[str, str, int, str]]] = {
    "plain": ({"template": QWEN}, "Just text.\n", ("", "Just text.\n", 0, "stop")),
    "thought": (
        {"template": QWEN},
        "<think>\nHm\u00e9\n</think>\n\nYes.",
        ("Hm\u00e9", "Yes.", 0, "stop"),
    ),
    "hermes": (
        {"template": QWEN},
        f"<think>\na\n</think>\n\nLook:\n{HERMES_CALL}\n{HERMES_CALL}",
        ("a", "Look:", 2, "tool_calls"),
    ),
    "opened": ({"template": OPENING}, f"a\n</think>\n\n{HERMES_CALL}", ("a", "", 1, "tool_calls")),
    "still open": ({"template": OPENING}, "never\n", ("never", "", 0, "stop")),
    "unknown tool": (
        {"template": QWEN},
        HERMES_CALL.replace("get_weather", "rm"),
        ("", HERMES_CALL.replace("get_weather", "rm"), 0, "stop"),
    ),
    "broken": (
        {"template": QWEN},
        '<tool_call>{"name": "now", "arguments": {\'a\'}}</tool_call>',
        ("", "'a'}}</tool_call>", 1, "stop"),
    ),
    "coder": ({"template": CODER}, CODER_CALL, ("", "", 1, "tool_calls")),
    "kimi": ({"template": KIMI}, f"<think>a</think>b{KIMI_CALL}", ("a", "b", 1, "tool_calls")),
    "named": (
        {"template": QWEN, "tool_call_parser": "llama3", "reasoning_parser": "passthrough"},
        f'{{"name": "get_weather", "parameters": {OSLO}}}',
        ("", "", 1, "tool_calls"),
    ),
    "harmony": (
        {"template": QWEN, "model_type": "gpt_oss", "reasoning_parser": "base"},
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{OSLO}<|call|>",
        ("a", "", 1, "tool_calls"),
    ),
}


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("chunk", [1, 2, 7, 200])
async def test_streams_add_up_to_the_whole_answer(name: str, chunk: int) -> None:
    options, text, (reasoning, content, num_calls, finish) = GRID[name]
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, "n": 2}
    async with asking(**options) as ask:
        ask.engine.chunk, ask.engine.answers = chunk, {0: text, 1: "short"}
        answer = await ask.chat(**fields)
        ask.engine.answers = {0: text, 1: "short"}
        chunks = events(await ask.chat(**fields, stream=True))
        for index in (0, 1):
            whole, streamed = as_folded(answer, index), folded(chunks, index)
            if name != "kimi":
                for call in [*whole["calls"], *streamed["calls"]]:
                    assert call.pop("id").startswith("call_")
            assert streamed == whole
        whole = as_folded(answer)
        assert (whole["reasoning_content"], whole["content"]) == (reasoning, content)
        assert (len(whole["calls"]), whole["finish_reason"]) == (num_calls, finish)
        if finish == "tool_calls":
            assert all(json.loads(call["arguments"]) == json.loads(OSLO) for call in whole["calls"])
        ids = TOKENIZER.encode(text, add_special_tokens=False)
        assert whole["ids"][:-1] == ids and len(whole["entries"]) == len(ids) + 1
        assert answer.json()["usage"]["completion_tokens"] == len(ids) + 1 + len("short") + 1
    if name == "kimi":
        assert whole["calls"][0]["id"] == "functions.get_weather:0"


async def test_a_cut_answer_says_so_wherever_it_is_cut() -> None:
    text = f"<think>a</think>{HERMES_CALL}"
    async with asking(template=QWEN) as ask:
        for limit in range(1, len(TOKENIZER.encode(text)) + 1, 3):
            fields = {"tools": TOOLS, "max_tokens": limit}
            ask.engine.answers = {0: text}
            whole = as_folded(await ask.chat(**fields))
            streamed = folded(events(await ask.chat(**fields, stream=True)))
            for call in [*whole["calls"], *streamed["calls"]]:
                call.pop("id")
            assert whole == streamed and whole["finish_reason"] == "length"


async def test_entries_wait_for_held_back_text() -> None:
    """A mark that is swallowed gives its entries to the next chunk; a stream has no empty ones."""
    async with asking(template=QWEN) as ask:
        ask.engine.answers = {0: "<think>a</think>b"}
        chunks = events(await ask.chat(logprobs=True, stream=True))
        choices = [chunk["choices"][0] for chunk in chunks]
        shown = [
            (next(iter(choice["delta"].items())), len(choice["logprobs"]["content"]))
            for choice in choices
            if choice["logprobs"]
        ]
        assert shown == [
            (("reasoning_content", "a"), len("<think>a")),
            (("content", "b"), len(TOKENIZER.encode("</think>b"))),
            (("content", ""), 1),
        ]


async def test_without_tools_calls_are_text() -> None:
    async with asking(template=QWEN) as ask:
        for fields in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            ask.engine.answers = {0: f"<think>a</think>{HERMES_CALL}"}
            whole = as_folded(await ask.chat(**fields))
            assert (whole["content"], whole["calls"]) == (HERMES_CALL, [])
            prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids)
            assert "get_weather" not in prompt
    async with asking(template=CHATML) as ask:  # a model without any of it
        ask.engine.answers = {0: "<think>a</think> b\n"}
        assert as_folded(await ask.chat())["content"] == "<think>a</think> b\n"


async def test_one_call_if_no_more_are_wanted() -> None:
    async with asking(template=QWEN) as ask:
        fields = {"tools": TOOLS, "parallel_tool_calls": False}
        ask.engine.answers = {0: HERMES_CALL * 3}
        whole = as_folded(await ask.chat(**fields))
        ask.engine.answers = {0: HERMES_CALL * 3}
        streamed = folded(events(await ask.chat(**fields, stream=True)))
        assert len(whole["calls"]) == len(streamed["calls"]) == 1
        assert whole["finish_reason"] == streamed["finish_reason"] == "tool_calls"


async def test_special_tokens_are_shown_to_the_parser_alone() -> None:
    text = "a<|im_start|>b" + KIMI_CALL
    async with asking(template=KIMI) as ask:
        for skip, content in ((True, "ab"), (False, "a<|im_start|>b<|im_end|>")):
            ask.engine.answers = {0: text}
            whole = as_folded(await ask.chat(tools=TOOLS, skip_special_tokens=skip))
            assert (whole["content"], len(whole["calls"])) == (content, 1)
        ask.engine.answers = {0: text}
        assert as_folded(await ask.chat())["content"] == f"abfunctions.get_weather:0{OSLO}"


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("reasoning_content", {"reasoning_content"}),
        ("reasoning", {"reasoning"}),
        ("both", {"reasoning_content", "reasoning"}),
    ],
)
async def test_the_name_of_reasoning(field: str, names: set[str]) -> None:
    async with asking(template=QWEN, reasoning_field=field) as ask:
        ask.engine.answers = {0: "<think>a</think>b"}
        message = (await ask.chat()).json()["choices"][0]["message"]
        assert {name for name in message if "reasoning" in name} == names
        assert all(message[name] == "a" for name in names)
        ask.engine.answers = {0: "<think>a</think>b"}
        deltas = [chunk["choices"][0]["delta"] for chunk in events(await ask.chat(stream=True))]
        assert dict.fromkeys(names, "a") in deltas


async def test_the_openai_client_reads_and_returns_calls() -> None:
    async with asking(template=QWEN) as ask:
        client = openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", max_retries=0, http_client=ask.http
        )
        text = f"<think>a</think>Look:{HERMES_CALL}\n{HERMES_CALL}"
        turn: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        ask.engine.answers = {0: text}
        message = (await client.chat.completions.create(**turn)).choices[0].message
        assert message.content == "Look:" and message.tool_calls
        assert getattr(message, "reasoning_content", "") == "a"
        ask.engine.answers = {0: text}
        ids, pieces, finish = [], ["", ""], []
        async for chunk in await client.chat.completions.create(**turn, stream=True):
            finish += [chunk.choices[0].finish_reason] if chunk.choices[0].finish_reason else []
            for call in chunk.choices[0].delta.tool_calls or []:
                ids += [call.id] if call.id else []
                pieces[call.index] += call.function.arguments
        assert [call.function.arguments for call in message.tool_calls] == pieces == [OSLO, OSLO]
        assert len(set(ids)) == 2 and finish == ["tool_calls"]
        turn["messages"] += [message.model_dump()]
        turn["messages"] += [
            {"role": "tool", "tool_call_id": call.id, "content": "rain"}
            for call in message.tool_calls
        ]
        ask.engine.answers = {0: "It rains."}
        answer = await client.chat.completions.create(**turn)
        assert answer.choices[0].message.content == "It rains."
        prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids)
        assert prompt.count("Oslo") == 2 and prompt.count("rain") == 2
