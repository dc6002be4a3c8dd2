"""Tool calls in turns with the bundled model, whose own template knows no tools: three times a call
that a grammar forces, and its result, through each API, whole and streamed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import pytest
from openai import OpenAI

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
QUESTION: Any = [{"role": "user", "content": "How is the weather in Oslo?"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now", "parameters": NOTHING}},
]
RESULTS = ("rain, 4 degrees", "sun", "snow")
GREEDY: Any = {"model": "smollm2", "temperature": 0}


def check_call(name: str, arguments: str) -> None:
    allowed = {"weather": ({"city": "Oslo"}, {"city": "Paris"}), "now": ({},)}
    assert json.loads(arguments) in allowed[name]


def prompt_of(server: str, messages: Any) -> str:
    body = {"messages": messages, "tools": TOOLS}
    answer = httpx.post(f"{server}/v1/chat/completions/render", json=body)
    text: str = answer.json()["prompts"][0]["text"]
    return text


def whole_chat(client: OpenAI, fields: Any) -> Any:
    return client.chat.completions.create(**fields)


def streamed_chat(client: OpenAI, fields: Any) -> Any:
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        return stream.get_final_completion()


@pytest.mark.parametrize("ask", [whole_chat, streamed_chat])
def test_chat(server: str, client: OpenAI, ask: Callable[[OpenAI, Any], Any]) -> None:
    messages, ids, num_prompt = list(QUESTION), set(), 0
    fields: Any = {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    for result in RESULTS:
        answer = ask(client, {**GREEDY, "messages": messages, **fields})
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and not choice.message.content
        (call,) = choice.message.tool_calls
        check_call(call.function.name, call.function.arguments)
        ids.add(call.id)
        assert answer.usage.prompt_tokens > num_prompt, "turn after turn the prompt grows"
        # What the model wrote goes back as it was written, so that its KV is found again.
        assert answer.usage.prompt_tokens_details.cached_tokens >= num_prompt // 16 * 16
        num_prompt = answer.usage.prompt_tokens
        messages += [
            {"role": "assistant", "tool_calls": [call.to_dict()]},
            {"role": "tool", "tool_call_id": call.id, "content": result},
        ]
    assert len(ids) == 3
    prompt = prompt_of(server, messages)
    for result in RESULTS:
        assert f"<tool_response>\n{result}\n</tool_response>" in prompt
    spelled = json.dumps(json.loads(call.function.arguments), ensure_ascii=False)
    assert f'<tool_call>\n{{"name": "{call.function.name}", "arguments": {spelled}}}' in prompt


def test_streams_are_the_whole_answer(client: OpenAI) -> None:
    fields: Any = {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "seed": 5}
    fields |= {"temperature": 1.0, "n": 3, "parallel_tool_calls": False, "model": "smollm2"}
    whole, streamed = whole_chat(client, fields), streamed_chat(client, fields)

    def shown(choice: Any) -> Any:
        calls = [each.function for each in choice.message.tool_calls]
        return choice.finish_reason, [(each.name, each.arguments) for each in calls]

    assert list(map(shown, whole.choices)) == list(map(shown, streamed.choices))
    assert whole.usage.completion_tokens == streamed.usage.completion_tokens


def whole_response(client: OpenAI, fields: Any) -> Any:
    return client.responses.create(**fields)


def streamed_response(client: OpenAI, fields: Any) -> Any:
    with client.responses.stream(**fields) as stream:
        return stream.get_final_response()


@pytest.mark.parametrize("ask", [whole_response, streamed_response])
def test_responses(client: OpenAI, ask: Callable[[OpenAI, Any], Any]) -> None:
    """Items go back by the id of the response before, then all by themselves."""
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    fields: Any = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    given, before, items = list(QUESTION), None, list(QUESTION)
    for result in RESULTS:
        more = {} if before is None else {"previous_response_id": before}
        response = ask(client, {**GREEDY, "input": given, **fields, **more})
        assert response.status == "completed"
        (call,) = response.output
        assert call.type == "function_call"
        check_call(call.name, call.arguments)
        output = {"type": "function_call_output", "call_id": call.call_id, "output": result}
        given, before = [output], response.id
        items += [call.to_dict(), output]
    again = ask(client, {**GREEDY, "input": items[:-2], **fields})
    assert [(item.name, item.arguments) for item in again.output] == [(call.name, call.arguments)]
    assert again.usage.input_tokens == response.usage.input_tokens


def whole_message(client: anthropic.Anthropic, fields: Any) -> Any:
    return client.messages.create(**fields)


def streamed_message(client: anthropic.Anthropic, fields: Any) -> Any:
    with client.messages.stream(**fields) as stream:
        return stream.get_final_message()


@pytest.mark.parametrize("ask", [whole_message, streamed_message])
def test_messages(server: str, ask: Callable[[anthropic.Anthropic, Any], Any]) -> None:
    tools = [
        {"name": tool["function"]["name"], "input_schema": tool["function"]["parameters"]}
        for tool in TOOLS
    ]
    fields: Any = {"model": "smollm2", "max_tokens": 100, "tools": tools}
    fields |= {"extra_body": {"temperature": 0}}
    fields |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    messages, ids = list(QUESTION), set()
    with anthropic.Anthropic(base_url=server, api_key="none", max_retries=0) as client:
        for result in RESULTS:
            message = ask(client, {**fields, "messages": messages})
            assert message.stop_reason == "tool_use"
            (block,) = message.content
            check_call(block.name, json.dumps(block.input))
            ids.add(block.id)
            outcome = {"type": "tool_result", "tool_use_id": block.id, "content": result}
            messages += [
                {"role": "assistant", "content": [block.to_dict()]},
                {"role": "user", "content": [outcome]},
            ]
    assert len(ids) == 3
