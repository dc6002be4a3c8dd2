"""Chat messages: parts, roles, tool calls and reasoning, made fit for templates or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tokenspeed.request import InvalidRequest
from tokenspeed.text.messages import normalize_messages

Message = dict[str, Any]


def normal(*messages: Message, knows_developer: bool = False) -> list[Message]:
    return normalize_messages(list(messages), knows_developer=knows_developer)


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_parts_are_joined_alike_for_every_role(role: str) -> None:
    assert normal({"role": role, "content": parts("a", "b")}) == [{"role": role, "content": "ab"}]
    assert normal({"role": role, "content": []})[0]["content"] == ""
    assert normal({"role": role, "content": "ab"})[0]["content"] == "ab"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x/y.png"}}], "messages[0].content[0]"),
        ([*parts("a"), {"type": "wizard"}], "messages[0].content[1]"),
        (["a", "b"], "messages[0].content[0]"),
        ([{"text": "a"}], "messages[0].content[0]"),
        ([{"type": "text"}], "messages[0].content[0]"),
        ([{"type": ["text"], "text": "a"}], "messages[0].content[0]"),
        ([{"type": "text", "text": 3}], "messages[0].content[0]"),
        (7, "messages[0].content"),
        ({"type": "text"}, "messages[0].content"),
        (None, "messages[0].content"),
    ],
)
def test_bad_content_names_the_part(content: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        normal({"role": "user", "content": content})
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


@pytest.mark.parametrize("messages", [[], None, "hi", [3], [{"content": "x"}], [{"role": []}]])
def test_bad_lists_are_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        normalize_messages(messages, knows_developer=False)


def test_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"messages\[0\].role is 'wizard'"):
        normal({"role": "wizard", "content": "x"})


SYSTEM, DEVELOPER = {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}
USER = {"role": "user", "content": "U"}


def test_developer_is_system_for_templates_that_do_not_know_it() -> None:
    as_system = {"role": "system", "content": "D"}
    assert normal(DEVELOPER, USER) == [as_system, USER]
    assert normal(USER, DEVELOPER) == [as_system, USER]
    assert normal(DEVELOPER, USER, knows_developer=True) == [DEVELOPER, USER]


def test_developer_merges_with_the_system_message_which_stays_first() -> None:
    merged = {"role": "system", "content": "S\n\nD"}
    assert normal(SYSTEM, DEVELOPER, USER) == [merged, USER]
    assert normal(DEVELOPER, SYSTEM, USER) == [merged, USER]
    assert normal(SYSTEM, USER, DEVELOPER) == [merged, USER]
    assert normal(SYSTEM, DEVELOPER, DEVELOPER)[0]["content"] == "S\n\nD\n\nD"


def test_input_is_not_changed() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        SYSTEM,
        DEVELOPER,
    ]
    before = copy.deepcopy(messages)
    normalize_messages(messages, knows_developer=False)
    assert messages == before


def test_tool_call_arguments_become_objects() -> None:
    def call(arguments: Any) -> Message:
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
        }

    for given, expected in [('{"a": [1]}', {"a": [1]}), ("", {}), ({"a": 1}, {"a": 1})]:
        [message] = normal(call(given))
        assert message["tool_calls"][0]["function"]["arguments"] == expected
        assert message["content"] == ""
    for bad in ("{", "[1]", "null", "[" * 100_000, 3, None):
        with pytest.raises(InvalidRequest, match="arguments"):
            normal(call(bad))
    for calls in ({}, [3], [{"function": "f"}], [{"function": {}}]):
        with pytest.raises(InvalidRequest, match="tool_calls"):
            normal({"role": "assistant", "tool_calls": calls})


def test_reasoning_is_kept_under_every_name() -> None:
    for name in ("reasoning_content", "reasoning", "thinking"):
        [message] = normal({"role": "assistant", "content": "a", name: "hm"})
        assert message["reasoning_content"] == message["thinking"] == "hm"
    with pytest.raises(InvalidRequest, match="reasoning"):
        normal({"role": "assistant", "content": "a", "reasoning": 3})


def test_refusals_are_text_and_an_empty_assistant_is_refused() -> None:
    assert normal({"role": "assistant", "refusal": "no"})[0]["content"] == "no"
    part = {"type": "refusal", "refusal": "no"}
    assert normal({"role": "assistant", "content": [part]})[0]["content"] == "no"
    with pytest.raises(InvalidRequest, match="content is missing"):
        normal({"role": "assistant", "content": None})
