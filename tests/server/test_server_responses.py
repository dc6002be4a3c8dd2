"""/v1/responses: streamed and not, kept and gone on from, with the openai client and without."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from server_fakes import TOKENIZER, Asker, FakeClient, make_state, refused
from test_server_serve import running
from test_server_tools import GRID
from tool_fakes import HERMES_CALL, OSLO, QWEN, TOOLS, asking

from tokenspeed.server.response_store import ENTRY_OVERHEAD, ResponseStore

RESPONSES = "/v1/responses"
FLAT_TOOLS = [{"type": "function", **tool["function"]} for tool in TOOLS]
CHANGING = ("id", "created_at", "completed_at", "call_id", "parsed", "parsed_arguments")


async def respond(ask: Asker, **fields: Any) -> httpx.Response:
    return await ask.http.post(RESPONSES, json={"input": "Hi"} | fields)


def told(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream, whose names and numbers are checked."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = answer.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def folded(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a client makes of deltas alone. Done events must say the same."""
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    response: dict[str, Any] = events[0]["response"]
    output = response["output"]
    assert output == []
    for event in events[2:-1]:
        kind, index = event["type"].removeprefix("response."), event["output_index"]
        if kind == "output_item.added":
            assert index == len(output) and event["item"]["status"] == "in_progress"
            output.append(event["item"])
            continue
        assert index == len(output) - 1
        item = output[index]
        if kind == "output_item.done":
            item["status"] = event["item"]["status"]
            assert event["item"] == item
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part.added":
            item["content"] = [event["part"]]
        elif kind == "content_part.done":
            assert event["part"] == item["content"][0]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "function_call_arguments.done":
            assert (event["arguments"], event["name"]) == (item["arguments"], item["name"])
        elif kind.endswith(".delta"):
            item["content"][0]["text"] += event["delta"]
            item["content"][0].get("logprobs", []).extend(event.get("logprobs", []))
        else:
            assert kind in ("output_text.done", "reasoning_text.done")
            assert event["text"] == item["content"][0]["text"]
            if "logprobs" in event:  # those of tokens that show no text come last
                shown = item["content"][0]["logprobs"]
                assert event["logprobs"][: len(shown)] == shown
                item["content"][0]["logprobs"] = event["logprobs"]
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    assert last["output"] == output
    return dict(last)


def same(value: Any) -> Any:
    """Without what differs from one answer to the next."""
    if isinstance(value, dict):
        return {name: same(inner) for name, inner in value.items() if name not in CHANGING}
    return [same(inner) for inner in value] if isinstance(value, list) else value


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("case", GRID)
async def test_streams_are_the_whole_answer(case: str, chunk: int) -> None:
    options, text, (reasoning, content, num_calls, _) = GRID[case]
    async with asking(**options) as ask:
        ask.engine.chunk, ask.engine.answers = chunk, {0: text}
        whole = (await respond(ask, tools=FLAT_TOOLS)).json()
        streamed = folded(told(await respond(ask, tools=FLAT_TOOLS, stream=True)))
        assert same(streamed) == same(whole)
        kinds: dict[str, list[Any]] = {"reasoning": [], "message": [], "function_call": []}
        for item in whole["output"]:
            kinds[item["type"]].append(item)
        texts = {
            name: "".join(part["text"] for item in kinds[name] for part in item["content"])
            for name in ("reasoning", "message")
        }
        assert texts == {"reasoning": reasoning, "message": content}
        assert len(kinds["function_call"]) == num_calls
        assert whole["status"] == "completed"
        used = whole["usage"]
        assert used["total_tokens"] == used["input_tokens"] + used["output_tokens"]
        num_reasoning = used["output_tokens_details"]["reasoning_tokens"]
        assert (num_reasoning > 0) == bool(reasoning)
        assert num_reasoning <= used["output_tokens"]


async def test_a_cut_answer_says_so(ask: Asker) -> None:
    for fields in ({}, {"stream": True}):
        answer = await respond(ask, max_output_tokens=5, **fields)
        response = folded(told(answer)) if fields else answer.json()
        assert (response["status"], response["completed_at"]) == ("incomplete", None)
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        (item,) = response["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", "Hello")
    ask.engine.answers = {0: ""}
    (item,) = (await respond(ask)).json()["output"]
    assert (item["status"], item["content"][0]["text"]) == ("completed", "")


async def test_logprobs_go_with_the_text(ask: Asker) -> None:
    fields: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await respond(ask, **fields)).json()
    entries = whole["output"][0]["content"][0]["logprobs"]
    assert len(entries) == whole["usage"]["output_tokens"]
    assert [len(entry["top_logprobs"]) for entry in entries] == [2] * len(entries)
    assert same(folded(told(await respond(ask, stream=True, **fields)))) == same(whole)
    async with asking(template=QWEN) as parted:
        assert refused(await respond(parted, **fields))["param"] == "include"


async def test_a_response_is_kept_and_gone_on_from() -> None:
    async with asking(template=QWEN) as ask:
        ask.engine.answers = {0: f"<think>hm</think>Look:{HERMES_CALL}"}
        first = (await respond(ask, tools=FLAT_TOOLS, instructions="Be brief.")).json()
        assert (await ask.http.get(f"{RESPONSES}/{first['id']}")).json() == first
        call = first["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
        ask.engine.answers = {0: "It rains."}
        second = (
            await respond(ask, previous_response_id=first["id"], input=[output], stream=True)
        ).text
        prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids, skip_special_tokens=False)
        assert "Hi" in prompt and "Look:" in prompt and "Oslo" in prompt and "rain" in prompt
        assert "Be brief." not in prompt, "instructions are those of one response"
        last = json.loads(second.rstrip().rpartition("data: ")[2])["response"]
        sent = [{"role": "user", "content": "Hi"}, *first["output"], output]
        await respond(ask, input=sent)
        assert (
            TOKENIZER.decode(ask.engine.requests[-1].prompt_ids, skip_special_tokens=False)
            == prompt
        ), "sent again, the items make the same prompt"
        third = await respond(ask, previous_response_id=last["id"], input="And now?")
        assert third.json()["previous_response_id"] == last["id"]
        prompt = TOKENIZER.decode(ask.engine.requests[-1].prompt_ids)
        assert prompt.index("rain") < prompt.index("It rains.") < prompt.index("And now?")

        assert (await ask.http.delete(f"{RESPONSES}/{first['id']}")).json() == {
            "id": first["id"],
            "object": "response",
            "deleted": True,
        }
        refused(await ask.http.get(f"{RESPONSES}/{first['id']}"), 404)
        refused(await ask.http.delete(f"{RESPONSES}/{first['id']}"), 404)
        error = refused(await respond(ask, previous_response_id=first["id"]))
        assert error["code"] == "previous_response_not_found"
        assert (await respond(ask, previous_response_id=last["id"])).status_code == 200


async def test_what_is_not_to_be_kept_is_not() -> None:
    async with asking() as ask:
        answer = (await respond(ask, store=False)).json()
        assert answer["store"] is False and len(ask.state.shared.responses) == 0
    async with asking(response_store_bytes=0) as ask:
        assert refused(await respond(ask, store=True))["param"] == "store"
        assert (await respond(ask)).json()["store"] is False
    async with asking(response_store_bytes=3000) as ask:
        assert (await respond(ask, instructions="x" * 3000)).json()["store"] is False
        assert (await respond(ask)).json()["store"] is True


async def test_the_store_is_bounded_in_bytes_and_time() -> None:
    now = 0.0
    store = ResponseStore(3 * (100 + ENTRY_OVERHEAD), 10.0, lambda: now)
    for name in "abcd":
        assert await store.put(name, b"x" * 50, b"y" * 50)
        now += 1
    assert [await store.get(name) is not None for name in "abcd"] == [False, True, True, True]
    assert store.num_bytes == 3 * (100 + ENTRY_OVERHEAD)
    assert not await store.put("e", b"x" * 3000, b"") and len(store) == 3
    assert await store.put("b", b"", b"") and (await store.get("b")).answer == b""  # type: ignore[union-attr]
    now = 12.5
    assert await store.get("c") is None and not await store.delete("c")
    assert (
        await store.get("d") is not None and await store.delete("d") and not await store.delete("d")
    )
    now = 99.0
    assert await store.get("b") is None and store.num_bytes == 0 and len(store) == 0


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"conversation": "conv_1"}, "conversation"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"include": ["web_search_call.results"]}, "include"),
    ({"max_tokens": 5}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
    ({"tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
]
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
    ({"input": []}, "input"),
    ({"input": 3}, "input"),
    ({"input": [{"content": "no role"}]}, "input[0]"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, "input[0].call_id"),
    ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"max_output_tokens": 1 << 40}, "max_output_tokens"),
    ({"temperature": 3}, "temperature"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
    ({"tool_choice": "required"}, "tool_choice"),
]


async def test_refusals_name_the_field_of_this_api(ask: Asker) -> None:
    for fields, param in REFUSED + WRONG:
        error = refused(await respond(ask, **fields))
        assert error["param"] == param, fields
        assert not error["message"].startswith(("messages", "max_completion", "prompt has"))
        if (fields, param) in REFUSED:
            assert error["code"] == "unsupported_parameter", fields
    error = refused(await respond(ask, max_output_tokens=9999))
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")


async def test_an_input_of_reasoning_without_text_is_told_from_an_empty_one(ask: Asker) -> None:
    blank = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    for items, why in (([], "input is an empty list"), ([blank, blank], "only reasoning items")):
        error = refused(await respond(ask, input=items))
        assert why in error["message"] and error["param"] == "input"
    for extra in ({"instructions": "Go on."}, {"input": [blank, {"role": "user", "content": "x"}]}):
        assert (await respond(ask, **{"input": [blank]} | extra)).status_code == 200


async def test_a_failed_stream_ends_with_a_failed_response(ask: Asker) -> None:
    ask.engine.die_after = 3
    events = told(await respond(ask, stream=True))
    assert events[-1]["type"] == "response.failed"
    response = events[-1]["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "engine_dead")
    assert response["output"][0]["content"][0]["text"] == "Hel"
    assert len(ask.state.shared.responses) == 0
    ask.engine.state, ask.engine.die_after = "ready", -1


async def test_the_openai_client_talks_in_turns() -> None:
    async with asking(template=QWEN) as ask:
        client = openai.AsyncOpenAI(
            base_url="http://server/v1", api_key="none", max_retries=0, http_client=ask.http
        )
        tools: Any = FLAT_TOOLS
        ask.engine.answers = {0: f"<think>a</think>Look:{HERMES_CALL}"}
        response = await client.responses.create(model="m", input="Hi", tools=tools)
        assert response.output_text == "Look:"
        call = response.output[-1]
        assert call.type == "function_call" and json.loads(call.arguments) == json.loads(OSLO)
        async with client.responses.stream(model="m", input="Hi", tools=tools) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        assert same(final.to_dict())["output"] == same(response.to_dict())["output"]
        assert kinds[-1] == "response.completed"
        assert (await client.responses.retrieve(final.id)).output_text == "Look:"
        ask.engine.answers = {0: "It rains."}
        output: Any = {
            "type": "function_call_output",
            "call_id": call.call_id,
            "output": "rain",
        }
        answer = await client.responses.create(
            model="m", input=[output], previous_response_id=response.id
        )
        assert answer.output_text == "It rains."
        await client.responses.delete(answer.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(answer.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await client.responses.create(model="m", input="Hi", background=True)


async def test_the_openai_client_without_asyncio_over_a_socket() -> None:
    engine = FakeClient()

    def talk(url: str) -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            whole = client.responses.create(model="m", input="Hi").output_text
            with client.responses.stream(model="m", input="Hi") as stream:
                pieces = [e.delta for e in stream if e.type == "response.output_text.delta"]
            return whole, "".join(pieces)

    async with running(engine) as server:
        await server.until("ready")
        assert await asyncio.to_thread(talk, server.url) == (engine.answer, engine.answer)


async def test_a_schema_holds_the_answer(ask: Asker) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    answer = (await respond(ask, text={"format": form})).json()
    asked = ask.engine.requests[-1].params.structured_outputs
    assert asked is not None and json.loads(str(asked.json)) == schema
    assert answer["text"]["format"] == form


async def test_a_client_that_leaves_ends_its_request() -> None:
    client = FakeClient()
    client.pause_s = 0.01
    ask = Asker(client, make_state(client))
    asking = asyncio.create_task(respond(ask, max_output_tokens=200, ignore_eos=True))
    while not client.running:
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert len(client.aborted) == 1 and len(ask.state.shared.responses) == 0
    await ask.check_alive()
    await ask.http.aclose()
