"""Random bodies for every route that takes one, made from the types: each is answered or refused,
in the route's own form, and the server answers next as it did before.
"""

from __future__ import annotations

import asyncio
import json
import types
import typing
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from server_fakes import Asker, FakeClient, make_state
from test_server_fuzz import VALUES
from tool_fakes import QWEN

from tokenspeed.server.api import APIS
from tokenspeed.server.calls import CALLS
from tokenspeed.server.errors import ANTHROPIC_PATH

ROWS = {row.path: row.request for row in (*APIS.values(), *CALLS)}
KINDS = ("message", "text", "input_text", "function", "function_call", "tool_use", "tool_result")
NAMES = ("type", "role", "content", "name", "input", "text", "id", "call_id", "arguments", "tools")
WORDS = st.sampled_from([*KINDS, "user", "assistant", "thinking", "reasoning", "x", "json_schema"])
PARTS = st.recursive(
    WORDS | VALUES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOD: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hi"}],
    "input": "Hi",
    "max_tokens": 9,
    "tokens": [5, 6],
}


def of_type(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, as far as it tells."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return st.one_of([of_type(each) for each in typing.get_args(kind)])
    if typing.get_origin(kind) is list:
        return st.lists(of_type(typing.get_args(kind)[0]), max_size=3)
    if typing.get_origin(kind) is dict:
        return st.dictionaries(st.sampled_from(NAMES), PARTS, max_size=4)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = typing.get_type_hints(kind)
        fields = {name: of_type(hints[name]) for name in kind.__struct_fields__}
        return st.fixed_dictionaries({}, optional=fields)
    plain = {
        str: WORDS,
        int: st.integers(-2, 300) | st.integers(),
        float: st.floats(-3, 3),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain.get(kind, PARTS)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    path = draw(st.sampled_from(sorted(ROWS)))
    hints = typing.get_type_hints(ROWS[path])
    names = list(ROWS[path].__struct_fields__)
    body = {name: value for name, value in GOOD.items() if name in names}
    for name in draw(st.lists(st.sampled_from(names), max_size=4, unique=True)):
        body[name] = draw(of_type(hints[name]) | PARTS)
    return path, body


@settings(max_examples=100, deadline=None)
@given(asked=bodies())
def test_no_body_of_any_route_is_a_server_error(asked: tuple[str, dict[str, Any]]) -> None:
    path, body = asked
    asyncio.run(post(path, json.dumps(body).encode()))


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from(sorted(ROWS)),
    junk=st.sampled_from(
        [b"", b"[]", b'"x"', b"NaN", b'{"input": "\\ud800"}', b'{"a":' * 300, b"[" * 5000, b"\xff"]
    )
    | st.sampled_from(["messages", "input", "prompt", "tokens", "max_tokens", "tools"]).flatmap(
        lambda name: st.sampled_from(
            [b"NaN", b"1e999", b'"\\ud800"', b"[" * 200 + b"]" * 200, b"9" * 400, b'{"a":' * 90]
        ).map(lambda value: b'{"' + name.encode() + b'":' + value + b"}")
    ),
)
def test_no_damaged_body_of_any_route_is_a_server_error(path: str, junk: bytes) -> None:
    asyncio.run(post(path, junk))


async def post(path: str, body: bytes) -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, template=QWEN, api_key=("k",)))
    ask.http.headers["authorization"] = "Bearer k"
    reply = await ask.http.post(path, content=body)
    assert reply.status_code in (200, 400, 404), (path, body, reply.text)
    if reply.status_code != 200:
        names = {"type", "message"} if path.startswith(ANTHROPIC_PATH) else {"message", "type"}
        error = reply.json()["error"]
        assert names <= error.keys() and 0 < len(error["message"]) <= 600
        assert "Traceback" not in reply.text and len(reply.content) < 2000
    await ask.http.post("/continue_generation")
    await ask.check_alive()
    await ask.http.aclose()
