"""The `openai` client against the real server: each of its APIs, in each way it can be called."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
CAPITAL = GOLDEN["prompts"][0]
MESSAGES: Any = CAPITAL["messages"]
ANSWER = CAPITAL["runs"]["weights_gguf_fp32_compute_fp32"]["text"]
COUNT = "1, 2, 3, 4, 5,"
GREEDY: Any = {"model": "smollm2", "temperature": 0}


class City(BaseModel):
    name: Literal["Paris", "Oslo"]
    is_large: bool


@pytest.fixture
async def aclient(server: str) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: OpenAI) -> None:
    fields: Any = {**GREEDY, "messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
    whole = client.chat.completions.create(**fields)
    assert whole.choices[0].message.content == ANSWER
    with client.chat.completions.stream(**fields, stream_options={"include_usage": True}) as stream:
        pieces = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(pieces) == ANSWER and len(pieces) > 3
    assert final.choices[0].message.content == ANSWER
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None and final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    for choice in (whole.choices[0], final.choices[0]):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert len(choice.logprobs.content) == whole.usage.completion_tokens
        assert b"".join(bytes(each.bytes or ()) for each in choice.logprobs.content[:-1]) == (
            ANSWER.encode()
        )
    assert [each.logprob for each in final.choices[0].logprobs.content] == pytest.approx(
        [each.logprob for each in whole.choices[0].logprobs.content], abs=1e-4
    )


async def test_chat_with_asyncio(aclient: AsyncOpenAI) -> None:
    whole = await aclient.chat.completions.create(**GREEDY, messages=MESSAGES)
    assert whole.choices[0].message.content == ANSWER
    chunks = await aclient.chat.completions.create(**GREEDY, messages=MESSAGES, stream=True)
    assert "".join([chunk.choices[0].delta.content or "" async for chunk in chunks]) == ANSWER
    async with aclient.chat.completions.stream(**GREEDY, messages=MESSAGES) as stream:
        assert (await stream.get_final_completion()).choices[0].message.content == ANSWER


async def test_chat_parse(client: OpenAI, aclient: AsyncOpenAI) -> None:
    fields: Any = {**GREEDY, "messages": MESSAGES, "response_format": City}
    parsed = client.chat.completions.parse(**fields).choices[0].message
    assert isinstance(parsed.parsed, City)
    assert parsed.parsed == City.model_validate_json(parsed.content or "")
    again = await aclient.chat.completions.parse(**fields)
    assert again.choices[0].message.parsed == parsed.parsed
    async with aclient.chat.completions.stream(**fields) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == parsed.parsed
    tool = openai.pydantic_function_tool(City)
    calling = client.chat.completions.parse(
        **GREEDY, messages=MESSAGES, tools=[tool], tool_choice="required", parallel_tool_calls=False
    )
    (call,) = calling.choices[0].message.tool_calls or ()
    assert call.function.name == "City" and isinstance(call.function.parsed_arguments, City)


async def test_completions(client: OpenAI, aclient: AsyncOpenAI) -> None:
    fields: Any = {**GREEDY, "prompt": [COUNT, COUNT], "max_tokens": 6, "logprobs": 1, "n": 2}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    other = await aclient.completions.create(**fields)
    streamed = [chunk async for chunk in await aclient.completions.create(**fields, stream=True)]
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [each.text for each in other.choices] == [each.text for each in whole.choices]
    for choice in whole.choices:
        assert (choice.text, choice.finish_reason) == (whole.choices[0].text, "length")
        assert choice.logprobs is not None and len(choice.logprobs.tokens or ()) == 6
        for stream in (chunks, streamed):
            own = [c for chunk in stream for c in chunk.choices if c.index == choice.index]
            assert "".join(each.text for each in own) == choice.text
            tokens = [
                token for each in own if each.logprobs for token in each.logprobs.tokens or ()
            ]
            assert tokens == choice.logprobs.tokens
            assert own[-1].finish_reason == "length"
    scored = client.completions.create(**{**fields, "n": 1}, echo=True)
    assert scored.choices[0].text == COUNT + whole.choices[0].text
    assert scored.choices[0].logprobs is not None
    assert (scored.choices[0].logprobs.token_logprobs or [0])[0] is None


async def test_responses(client: OpenAI, aclient: AsyncOpenAI) -> None:
    fields: Any = {**GREEDY, "input": MESSAGES}
    whole = client.responses.create(**fields)
    assert (whole.output_text, whole.status) == (ANSWER, "completed")
    with client.responses.stream(**fields) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert (final.output_text, kinds[-1]) == (ANSWER, "response.completed")
    assert final.usage and whole.usage and final.usage.output_tokens == whole.usage.output_tokens
    assert (await aclient.responses.create(**fields)).output_text == ANSWER
    events = [event async for event in await aclient.responses.create(**fields, stream=True)]
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert client.responses.retrieve(whole.id).output_text == ANSWER
    more = await aclient.responses.create(
        **GREEDY, input="And of Norway?", previous_response_id=whole.id, max_output_tokens=3
    )
    assert more.usage is not None and whole.usage is not None
    assert more.usage.input_tokens > whole.usage.input_tokens + whole.usage.output_tokens
    assert (more.status, more.previous_response_id) == ("incomplete", whole.id)


async def test_responses_parse(client: OpenAI, aclient: AsyncOpenAI) -> None:
    fields: Any = {**GREEDY, "input": MESSAGES, "text_format": City}
    parsed = client.responses.parse(**fields).output_parsed
    assert isinstance(parsed, City)
    assert (await aclient.responses.parse(**fields)).output_parsed == parsed
    with client.responses.stream(**fields) as stream:
        assert stream.get_final_response().output_parsed == parsed
