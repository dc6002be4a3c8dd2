"""Random values in every field: a request is served or refused, never a server error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import ANSWER, CHAT, CHATML, COMPLETIONS, Asker, FakeClient, make_state
from tool_fakes import QWEN

from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_completions import CompletionRequest
from tokenspeed.server.unsupported import UNSUPPORTED

FIELDS = sorted(
    {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *UNSUPPORTED}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 300)
    | st.floats()
    | st.text(st.characters(codec="utf-8"), max_size=20)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={"content": VALUES, "name": VALUES, "tool_calls": VALUES},
    ),
    max_size=3,
)
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=5)


@settings(max_examples=150, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS]), fields=BODIES, messages=MESSAGES)
def test_no_body_is_a_server_error(path: str, fields: dict[str, Any], messages: list[Any]) -> None:
    body = {"prompt": "Hi", "max_tokens": 4, "messages": messages} | fields
    status = asyncio.run(post(path, json.dumps(body).encode()))
    assert status in (200, 400, 404), body


def named(name: str) -> dict[str, str]:
    return {"name": name}


NAMES = st.sampled_from(["add", "get_weather", "a b", ""])
TOOLS = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["function", "function", "other"])},
        optional={
            "function": st.fixed_dictionaries(
                {"name": NAMES},
                optional={"parameters": VALUES, "strict": SCALARS, "description": SCALARS},
            )
        },
    ),
    max_size=3,
)
CHOICES = (
    st.sampled_from(["auto", "none", "required"])
    | st.fixed_dictionaries({"type": st.just("function"), "function": VALUES | NAMES.map(named)})
    | VALUES
)
CALLS = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": NAMES}, optional={"arguments": VALUES})},
        optional={"id": SCALARS, "type": SCALARS},
    ),
    max_size=2,
)
PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    '{"name": "add", "arguments": {',
    "}",
    '"',
    "\u00e9",
]


@settings(max_examples=40, deadline=None)
@given(
    tools=TOOLS,
    fields=st.fixed_dictionaries(
        {},
        optional={
            "tool_choice": CHOICES,
            "parallel_tool_calls": SCALARS,
            "reasoning_effort": st.sampled_from(["none", "low", "x"]),
            "stream": st.booleans(),
        },
    ),
    calls=CALLS,
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
)
def test_no_tools_are_a_server_error(
    tools: list[Any], fields: dict[str, Any], calls: list[Any], pieces: list[str]
) -> None:
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "content": "x", "tool_call_id": "y"},
    ]
    body = json.dumps({"messages": messages, "tools": tools} | fields).encode()
    status = asyncio.run(post(CHAT, body, QWEN, "".join(pieces)))
    assert status in (200, 400), body


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS]), data=st.data())
def test_no_damaged_json_is_a_server_error(path: str, data: st.DataObject) -> None:
    good = json.dumps({"prompt": "Hi", "messages": [{"role": "user", "content": "x"}]}).encode()
    at = data.draw(st.integers(0, len(good)))
    junk = data.draw(st.binary(max_size=3))
    status = asyncio.run(post(path, good[:at] + junk + good[at + len(junk) :]))
    assert status in (200, 400, 404)


async def post(path: str, body: bytes, template: str = CHATML, answer: str = ANSWER) -> int:
    client = FakeClient()
    assert client.ready is not None
    client.ready = msgspec.structs.replace(client.ready, max_model_len=4096)
    client.answers = dict.fromkeys(range(20), answer)
    ask = Asker(client, make_state(client, template=template))
    reply = await ask.http.post(path, content=body)
    if reply.status_code != 200:
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert len(reply.content) < 2000
    await ask.check_alive()
    await ask.http.aclose()
    return reply.status_code
