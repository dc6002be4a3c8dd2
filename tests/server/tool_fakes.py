"""Templates and answers with reasoning and calls, and messages in one form, streamed or not."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
from server_fakes import CHATML, Asker, FakeClient, make_state

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    },
    {"type": "function", "function": {"name": "now"}},
]
TOOLS_HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call>{MARK}</tool_call><|im_end|>\n{% endif %}"
)
CALLS = (
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>"
    "{% endfor %}"
)
QWEN = (
    TOOLS_HEAD.replace("{MARK}", "")
    + CHATML.replace("{{ m.content }}", "{{ m.content }}" + CALLS)
    + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% endif %}"
)
OPENING = QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
CODER = QWEN.replace("<tool_call></tool_call>", "<tool_call><function=x><parameter=y></tool_call>")
KIMI = QWEN.replace("<tool_call></tool_call>", "<|tool_calls_section_begin|>")
OSLO = '{"city": "Oslo \u00e9"}'
HERMES_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {OSLO}}}\n</tool_call>'
CODER_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo \u00e9\n</parameter>\n"
    "</function>\n</tool_call>"
)
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
    f"<|tool_call_argument_begin|>{OSLO}<|tool_call_end|><|tool_calls_section_end|>"
)


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Asker]:
    client = FakeClient()
    assert client.ready is not None
    client.ready = msgspec.structs.replace(client.ready, max_model_len=4096)
    asker = Asker(client, make_state(client, **options))
    yield asker
    await asker.check_alive()
    await asker.http.aclose()


def folded(chunks: list[Any], index: int = 0) -> dict[str, Any]:
    """The message that a stream's deltas add up to, as clients add them; their form is checked."""
    message: dict[str, Any] = {"calls": [], "entries": [], "ids": []}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            delta = choice["delta"]
            if "role" not in message:
                assert delta == {"role": "assistant", "content": ""}
                message |= {"role": "assistant", "content": "", "reasoning_content": ""}
                continue
            assert "finish_reason" not in message
            assert len(delta) == (choice["finish_reason"] is None)
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(message["calls"]) and call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    message["calls"].append({"id": call["id"], **call["function"]})
                else:
                    assert set(call) == {"index", "function"}
                    assert call["index"] == len(message["calls"]) - 1
                    assert set(call["function"]) == {"arguments"} and call["function"]["arguments"]
                    message["calls"][-1]["arguments"] += call["function"]["arguments"]
            message["entries"] += (choice["logprobs"] or {"content": []})["content"]
            message["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"] is not None:
                message["finish_reason"] = choice["finish_reason"]
    return message


def as_folded(answer: httpx.Response, index: int = 0) -> dict[str, Any]:
    """A whole answer in the same form."""
    assert answer.status_code == 200, answer.text
    return message_of(answer.json()["choices"][index])


def message_of(choice: dict[str, Any]) -> dict[str, Any]:
    """A choice of it."""
    message = choice["message"]
    assert message.get("tool_calls") != [] and message.get("reasoning_content") != ""
    assert message["content"] != "" or set(message) == {"role", "content", "refusal"}
    return {
        "role": message["role"],
        "content": message["content"] or "",
        "reasoning_content": message.get("reasoning_content", ""),
        "calls": [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", ())],
        "entries": (choice["logprobs"] or {"content": []})["content"],
        "ids": choice.get("token_ids", []),
        "finish_reason": choice["finish_reason"],
    }
