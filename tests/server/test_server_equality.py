"""A stream adds up to the whole answer, whatever was asked, however the engine's tokens come.

Requests are drawn from a grid of parameters, for each API, over an engine that plays outputs with
reasoning, calls, split characters and marks that are none. Where the whole answer is refused, its
stream is too, in the same words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import test_server_messages as messages_api
import test_server_responses as responses_api
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_fakes import CHATML, EOS, TOKENIZER, Asker
from test_server_text import events
from tool_fakes import HERMES_CALL, OPENING, QWEN, TOOLS, asking, folded, message_of

PIECES = st.sampled_from(
    [
        *("<think>", "</think>", HERMES_CALL, "<tool_call>", "</tool_call>", "\n", " ", "ab", "a"),
        *("\u00e9", "\U0001fae0", "{", '{"name": "now"}', "<", "stop", "<|im_start|>", "1, 2, 3"),
    ]
)
OUTPUTS = st.lists(PIECES, max_size=7).map("".join)
WORLDS = st.fixed_dictionaries(
    {
        "template": st.sampled_from([CHATML, QWEN, OPENING]),
        "outputs": st.lists(OUTPUTS, min_size=3, max_size=3),
        "chunk": st.sampled_from([1, 1, 2, 3, 7, 200]),
    }
)
STOPS = st.sampled_from(["a", "b<", "</think>", "stop", "\U0001fae0", " ", "2, 3"])
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
SAMPLING: dict[str, st.SearchStrategy[Any]] = {
    "n": st.integers(1, 3),
    "seed": st.integers(0, 9),
    "max_tokens": st.integers(1, 250),
    "min_tokens": st.integers(0, 4),
    "temperature": st.sampled_from([0, 0.5, 2]),
    "presence_penalty": st.sampled_from([-2, 0.5]),
    "repetition_penalty": st.sampled_from([0.5, 1.5]),
    "stop": STOPS | st.lists(STOPS, max_size=3),
    "stop_token_ids": st.lists(st.sampled_from([EOS, *TOKENIZER.encode("a2", False)]), max_size=2),
    "include_stop_str_in_output": st.booleans(),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "return_token_ids": st.booleans(),
    "stream_options": st.sampled_from(
        [{"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
    ),
}
FORMS = {"response_format": st.just(FORM), "structured_outputs": st.just({"regex": "a*"})}
CHOICES = st.sampled_from(
    ["auto", "none", "required", {"type": "function", "function": {"name": "now"}}]
)
CHAT_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **SAMPLING,
        "tools": st.just(TOOLS),
        "logprobs": st.booleans(),
        "top_logprobs": st.integers(0, 3),
        "tool_choice": CHOICES,
        "parallel_tool_calls": st.booleans(),
        "separate_reasoning": st.booleans(),
        "response_format": st.just(FORM),
    },
)
COMPLETION_FIELDS = st.fixed_dictionaries(
    {"prompt": st.sampled_from(["Hi", "\u00e9", ["a", "bc"], TOKENIZER.encode("ids", False)])},
    optional={
        **SAMPLING,
        **FORMS,
        "max_tokens": st.integers(0, 250),
        "echo": st.booleans(),
        "logprobs": st.integers(0, 3),
    },
)
RESPONSE_FIELDS = st.fixed_dictionaries(
    {},
    optional={
        **{name: SAMPLING[name] for name in ("temperature", "seed", "stop", "ignore_eos")},
        "max_output_tokens": st.integers(1, 250),
        "tools": st.just(responses_api.FLAT_TOOLS),
        "tool_choice": st.sampled_from(["auto", "none", "required"]),
        "parallel_tool_calls": st.booleans(),
        "text": st.just({"format": {"type": "json_schema", "name": "x", "schema": {}}}),
        "include": st.just(["message.output_text.logprobs"]),
        "top_logprobs": st.integers(0, 3),
        "store": st.booleans(),
    },
)
MESSAGE_FIELDS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 250)},
    optional={
        "temperature": st.sampled_from([0, 0.5]),
        "stop_sequences": st.lists(STOPS, max_size=3),
        "ignore_eos": st.booleans(),
        "tools": st.just(messages_api.NAMED_TOOLS),
        "tool_choice": st.sampled_from(
            [
                {"type": kind, "disable_parallel_tool_use": one}
                for kind in ("auto", "any")
                for one in (True, False)
            ]
        ),
        "thinking": st.just({"type": "disabled"}),
    },
)


def both(
    world: dict[str, Any], fields: dict[str, Any], post: Callable[..., Awaitable[httpx.Response]]
) -> tuple[Any, httpx.Response] | None:
    """The whole answer, token by token, and its stream; None if both are refused alike."""

    async def run(chunk: int, fields: dict[str, Any]) -> httpx.Response:
        async with asking(template=world["template"]) as ask:
            ask.engine.chunk, ask.engine.answers = chunk, dict(enumerate(world["outputs"]))
            return await post(ask, **fields)

    at_once = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = asyncio.run(run(1, at_once))
    streamed = asyncio.run(run(world["chunk"], {**fields, "stream": True}))
    if whole.status_code == 200:
        return whole.json(), streamed
    assert (whole.status_code, streamed.status_code) == (400, 400), whole.text
    assert whole.json() == streamed.json()
    return None


def check_usage(chunks: list[Any], fields: dict[str, Any], usage: Any) -> None:
    """Usage stands where it was asked for, and grows to that of the whole answer."""
    options = fields.get("stream_options") or {}
    if not options:
        assert all("usage" not in chunk for chunk in chunks)
        return
    last = chunks.pop()
    assert last["choices"] == [] and last["usage"] == usage
    counts = [chunk["usage"] and chunk["usage"]["completion_tokens"] for chunk in chunks]
    if options.get("continuous_usage_stats"):
        assert counts == sorted(counts) and counts[-1] == usage["completion_tokens"]
    else:
        assert set(counts) == {None}


def last_of(chunks: list[Any], index: int) -> Any:
    """How the stream of a choice ends."""
    own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
    return own[-1]["finish_reason"], own[-1].get("stop_reason")


@settings(max_examples=60, deadline=None)
@given(world=WORLDS, fields=CHAT_FIELDS)
def test_chat(world: dict[str, Any], fields: dict[str, Any]) -> None:
    answers = both(world, fields, Asker.chat)
    if answers is None:
        return
    whole, streamed = answers
    chunks = events(streamed)
    check_usage(chunks, fields, whole["usage"])
    total = 0
    for choice in whole["choices"]:
        index = choice["index"]
        expected, found = message_of(choice), folded(chunks, index)
        for call in [*expected["calls"], *found["calls"]]:
            assert call.pop("id").startswith("call_")
        assert found == expected
        assert last_of(chunks, index) == (choice["finish_reason"], choice["stop_reason"])
        for name, asked in (("entries", "logprobs"), ("ids", "return_token_ids")):
            total += len(found[name])
            assert bool(found[name]) == bool(fields.get(asked))
    both_asked = bool(fields.get("logprobs")) + bool(fields.get("return_token_ids"))
    assert total == both_asked * whole["usage"]["completion_tokens"]


@settings(max_examples=40, deadline=None)
@given(world=WORLDS, fields=COMPLETION_FIELDS)
def test_completions(world: dict[str, Any], fields: dict[str, Any]) -> None:
    answers = both(world, fields, Asker.completion)
    if answers is None:
        return
    whole, streamed = answers
    chunks = events(streamed)
    check_usage(chunks, fields, whole["usage"])
    for choice in whole["choices"]:
        index = choice["index"]
        own = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(each["text"] for each in own) == choice["text"]
        assert last_of(chunks, index) == (choice["finish_reason"], choice["stop_reason"])
        for name in ("token_ids", "prompt_token_ids"):
            ids = [id for each in own for id in each.get(name, [])]
            assert ids == choice.get(name, [])
        columns = choice["logprobs"] or {}
        assert bool(columns) == ("logprobs" in fields)
        for name, values in columns.items():
            parts = [each["logprobs"][name] for each in own if each["logprobs"]]
            assert [value for part in parts for value in part] == values


@settings(max_examples=40, deadline=None)
@given(world=WORLDS, fields=RESPONSE_FIELDS)
def test_responses(world: dict[str, Any], fields: dict[str, Any]) -> None:
    answers = both(world, fields, responses_api.respond)
    if answers is not None:
        whole, streamed = answers
        found = responses_api.folded(responses_api.told(streamed))
        assert responses_api.same(found) == responses_api.same(whole)


@settings(max_examples=40, deadline=None)
@given(world=WORLDS, fields=MESSAGE_FIELDS)
@example(
    world={"template": QWEN, "outputs": [HERMES_CALL] * 3, "chunk": 3},
    fields={"max_tokens": 70, "tools": messages_api.NAMED_TOOLS},
)
def test_messages(world: dict[str, Any], fields: dict[str, Any]) -> None:
    answers = both(world, fields, post_message)
    if answers is not None:
        whole, streamed = answers
        found = messages_api.folded(messages_api.told(streamed))
        assert messages_api.same(found) == messages_api.same(whole)


async def post_message(ask: Asker, **fields: Any) -> httpx.Response:
    return await messages_api.post(ask, **fields)
