"""Random values in every field: a request is served or refused, never a server error."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import CHAT, COMPLETIONS, Asker, FakeClient, make_state

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


@settings(max_examples=100, deadline=None)
@given(path=st.sampled_from([CHAT, COMPLETIONS]), data=st.data())
def test_no_damaged_json_is_a_server_error(path: str, data: st.DataObject) -> None:
    good = json.dumps({"prompt": "Hi", "messages": [{"role": "user", "content": "x"}]}).encode()
    at = data.draw(st.integers(0, len(good)))
    junk = data.draw(st.binary(max_size=3))
    status = asyncio.run(post(path, good[:at] + junk + good[at + len(junk) :]))
    assert status in (200, 400, 404)


async def post(path: str, body: bytes) -> int:
    client = FakeClient()
    ask = Asker(client, make_state(client))
    answer = await ask.http.post(path, content=body)
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 2000
    await ask.check_alive()
    await ask.http.aclose()
    return answer.status_code
