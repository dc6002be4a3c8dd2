"""Anthropic's messages: streamed and not, with the anthropic client and without."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import anthropic
import httpx
import httpx2
import pytest
from server_fakes import TOKENIZER, Asker, FakeClient, make_state
from test_server_serve import running
from test_server_tools import GRID
from tool_fakes import HERMES_CALL, OSLO, QWEN, TOOLS, asking

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
NAMED_TOOLS = [
    {"name": tool["function"]["name"]}
    | {"input_schema": tool["function"].get("parameters", {"type": "object"})}
    for tool in TOOLS
]
STOPS = {"stop": "end_turn", "tool_calls": "tool_use"}


async def post(ask: Asker, path: str = MESSAGES, **fields: Any) -> httpx.Response:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    if path == MESSAGES:
        body["max_tokens"] = 100
    return await ask.http.post(path, json=body | fields)


def client_of(ask: Asker) -> anthropic.AsyncAnthropic:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(ask.app))
    return anthropic.AsyncAnthropic(
        base_url="http://server", api_key="none", max_retries=0, http_client=http
    )


def prompt_of(ask: Asker) -> str:
    return TOKENIZER.decode(ask.engine.requests[-1].prompt_ids, skip_special_tokens=False)


def refused(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of a refusal, whose shape is checked."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return dict(body["error"])


def told(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names are checked."""
    assert answer.status_code == 200, answer.text
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client makes of a stream, whose order is checked. Pieces that are no
    whole object are those of a call that was cut, with which an answer ends.
    """
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    assert events[0]["type"] == "message_start"
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    is_open = is_cut = False
    for event in events[1:-2]:
        assert not is_cut, "an answer that is cut goes on"
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            pieces: list[str] = []
            is_open = True
            continue
        assert is_open and event["index"] == len(message["content"]) - 1
        block = message["content"][-1]
        name = "input" if block["type"] == "tool_use" else block["type"]
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            assert delta["type"] == ("input_json_delta" if name == "input" else f"{name}_delta")
            pieces.append(delta["partial_json" if name == "input" else name])
            continue
        assert event["type"] == "content_block_stop"
        is_open, text = False, "".join(pieces)
        if name != "input":
            assert block[name] == ""
            block[name] = text
        elif text:
            try:
                block[name] = json.loads(text)
            except json.JSONDecodeError:
                is_cut = True
    assert not is_open and not (is_cut and events[-2]["delta"]["stop_reason"] == "end_turn")
    return message | events[-2]["delta"] | {"usage": events[-2]["usage"]}


def same(message: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from one answer to the next."""
    content = [
        {name: value for name, value in block.items() if name != "id"}
        for block in message["content"]
    ]
    return message | {"id": "", "content": content}


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("case", [case for case in GRID if case != "broken"])
async def test_streams_are_the_whole_answer(case: str, chunk: int) -> None:
    options, text, (reasoning, content, num_calls, finish) = GRID[case]
    async with asking(**options) as ask:
        ask.engine.chunk, ask.engine.answers = chunk, {0: text}
        fields: dict[str, Any] = {"tools": NAMED_TOOLS, "max_tokens": 400}
        whole = (await post(ask, **fields)).json()
        assert same(folded(told(await post(ask, stream=True, **fields)))) == same(whole)
        texts = {"thinking": "", "text": ""}
        for block in whole["content"]:
            if block["type"] in texts:
                texts[block["type"]] += block[block["type"]]
        assert texts == {"thinking": reasoning, "text": content}
        calls = [block for block in whole["content"] if block["type"] == "tool_use"]
        assert len(calls) == num_calls
        assert all(call["input"] == json.loads(OSLO) for call in calls)
        assert whole["stop_reason"] == STOPS[finish]


async def test_stop_reasons_and_usage(ask: Asker) -> None:
    for fields in ({}, {"stream": True}):

        async def message(fields: dict[str, Any] = fields, **more: Any) -> dict[str, Any]:
            answer = await post(ask, **fields, **more)
            return folded(told(answer)) if fields else answer.json()

        ended = await message()
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
        cut = await message(max_tokens=5)
        assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "Hello")
        stopped = await message(stop_sequences=["zz", "lo"])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "lo")
        assert stopped["content"] == [{"type": "text", "text": "Hel"}]
        used, prompt = cut["usage"], ask.engine.requests[-2].prompt_ids
        assert used["input_tokens"] + used["cache_read_input_tokens"] == len(prompt)
        assert (used["cache_read_input_tokens"], used["output_tokens"]) == (1, 5)


async def test_blocks_become_the_prompt() -> None:
    async with asking(template=QWEN) as ask:
        call = {"type": "tool_use", "id": "c1", "name": "now", "input": {"a": 1}}
        result = {"type": "tool_result", "tool_use_id": "c1", "content": "noon"}
        cached = {"cache_control": {"type": "ephemeral"}}
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "Hi", **cached}]},
            {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
            {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
        ]
        system = [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]
        fields = {"messages": messages, "system": system, "tools": NAMED_TOOLS}
        assert (await post(ask, **fields)).status_code == 200
        prompt = prompt_of(ask)
        for part in ("system\nBe brief.", "user\nHi", "Let me see.", '"a": 1', "tool\nnoon"):
            assert part in prompt
        assert prompt.index("tool\nnoon") < prompt.index("user\nWell?")
        count = (await post(ask, COUNT, **fields)).json()
        assert count == {"input_tokens": len(ask.engine.requests[-1].prompt_ids)}

        start = {"role": "assistant", "content": "The answer is"}
        await post(ask, messages=[*messages[:1], start])
        assert prompt_of(ask).endswith("assistant\nThe answer is"), "it is gone on with"

        for thinking, is_off in (("enabled", False), ("disabled", True)):
            options = {"type": thinking, "budget_tokens": 1024}
            assert (await post(ask, thinking=options)).status_code == 200
            assert prompt_of(ask).endswith("<think>\n\n</think>\n\n") == is_off


async def test_choices_and_forms_reach_the_engine() -> None:
    async with asking(template=QWEN) as ask:
        named = {"type": "tool", "name": "now"}
        for choice, names in ((named, ["now"]), ({"type": "any"}, ["get_weather", "now"])):
            await post(ask, tools=NAMED_TOOLS, tool_choice=choice)
            asked = ask.engine.requests[-1].params.structured_outputs
            assert asked is not None and asked.tool_calls is not None
            assert [name for name, _ in asked.tool_calls.tools] == names
        one = {"type": "auto", "disable_parallel_tool_use": True}
        ask.engine.answers = {0: HERMES_CALL + HERMES_CALL}
        answer = await post(ask, tools=NAMED_TOOLS, tool_choice=one, max_tokens=400)
        assert [block["type"] for block in answer.json()["content"]] == ["tool_use"]
        schema = {"type": "object"}
        form = {"type": "json_schema", "schema": schema}
        await post(ask, output_config={"format": form})
        asked = ask.engine.requests[-1].params.structured_outputs
        assert asked is not None and json.loads(str(asked.json)) == schema
        await post(ask, top_k=3, top_p=0.5, temperature=0.25, stop_sequences=["x"])
        params = ask.engine.requests[-1].params
        assert (params.top_k, params.top_p, params.temperature) == (3, 0.5, 0.25)
        assert (params.stop, params.max_tokens) == (("x",), 100)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 9999}, "maximum context length is 256 tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "role is one of"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text parts only"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "list of blocks"),
    ({"system": 3}, "system"),
    ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, r"tools\[0\]"),
    ({"tool_choice": {"type": "must"}}, "tool_choice.type"),
    ({"thinking": {"type": "perhaps"}}, "thinking.type"),
    ({"thinking": {"type": "enabled"}}, "thinking is not supported"),
    ({"output_config": {"effort": "some"}}, "output_config.effort"),
    ({"output_config": {"format": {"type": "xml"}}}, "must be json_schema"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequences": [""]}, "stop"),
    ({"temperature": 2.5}, "temperature"),
]


async def test_refusals_have_the_form_of_this_api(ask: Asker) -> None:
    for fields, message in BAD:
        error = refused(await post(ask, **fields))
        assert error["type"] == "invalid_request_error"
        assert re.search(message, error["message"]), fields


async def test_every_error_under_its_path_has_its_form() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("secret",)))
    answers = [
        (await post(ask), 401, "authentication_error"),
        (await ask.http.get(MESSAGES), 401, "authentication_error"),
    ]
    ask.http.headers["x-api-key"] = "secret"
    answers += [
        (await ask.http.get(MESSAGES), 405, "invalid_request_error"),
        (await ask.http.post(MESSAGES + "/nothing"), 404, "not_found_error"),
        (await post(ask, model="other"), 404, "not_found_error"),
        (await ask.http.post(MESSAGES, content=b"{"), 400, "invalid_request_error"),
    ]
    client.state = "loading"
    answers += [(await post(ask), 503, "overloaded_error")]
    client.state = "ready"
    for answer, status, kind in answers:
        assert refused(answer, status)["type"] == kind
    assert (await post(ask)).status_code == 200
    ask.http.headers["x-api-key"] = "wrong"
    ask.http.headers["authorization"] = "Bearer secret"
    assert (await post(ask)).status_code == 200, "one valid key is enough"
    await ask.check_alive()
    await ask.http.aclose()


async def test_a_failed_stream_ends_with_an_error(ask: Asker) -> None:
    ask.engine.die_after = 3
    events = told(await post(ask, stream=True))
    assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
    assert events[0]["type"] == "message_start"
    ask.engine.state, ask.engine.die_after = "ready", -1


async def test_the_anthropic_client_talks_in_turns() -> None:
    async with asking(template=QWEN) as ask:
        client = client_of(ask)
        messages: Any = [{"role": "user", "content": "Hi"}]
        turn: Any = {"model": "m", "max_tokens": 400, "messages": messages, "tools": NAMED_TOOLS}
        ask.engine.answers = {0: f"<think>a</think>Look:{HERMES_CALL}"}
        message = await client.messages.create(**turn)
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        async with client.messages.stream(**turn) as stream:
            text = "".join([piece async for piece in stream.text_stream])
            final = await stream.get_final_message()
        assert text == "Look:"
        assert same(final.to_dict(exclude_none=True)) == same(message.to_dict(exclude_none=True))
        count = await client.messages.count_tokens(model="m", messages=messages, tools=NAMED_TOOLS)
        assert count.input_tokens == len(ask.engine.requests[-1].prompt_ids)
        call = message.content[-1]
        assert call.type == "tool_use"
        messages.append({"role": "assistant", "content": message.to_dict()["content"]})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
        messages.append({"role": "user", "content": [result]})
        ask.engine.answers = {0: "It rains."}
        answer = await client.messages.create(**turn)
        assert (answer.content[0].type, answer.stop_reason) == ("text", "end_turn")
        assert "rain" in prompt_of(ask)
        ask.engine.answers = {}
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**turn, extra_body={"temperature": 3.0})
        ask.engine.die_after = 2
        with pytest.raises(anthropic.APIStatusError, match="engine"):
            async with client.messages.stream(**turn) as stream:
                await stream.get_final_message()
        ask.engine.state, ask.engine.die_after = "ready", -1
        await client.close()


async def test_the_anthropic_client_without_asyncio_over_a_socket() -> None:
    engine = FakeClient()
    turn: Any = {"model": "m", "max_tokens": 100, "messages": [{"role": "user", "content": "Hi"}]}

    def talk(url: str) -> tuple[str, str]:
        with anthropic.Anthropic(base_url=url, api_key="key", max_retries=0) as client:
            block = client.messages.create(**turn).content[0]
            with client.messages.stream(**turn) as stream:
                return getattr(block, "text", ""), "".join(stream.text_stream)

    async with running(engine, api_key=("key",)) as server:
        server.http.headers["authorization"] = "Bearer key"
        await server.until("ready")
        assert await asyncio.to_thread(talk, server.url) == (engine.answer, engine.answer)
    assert engine.requests[-1].params.max_tokens == 100
