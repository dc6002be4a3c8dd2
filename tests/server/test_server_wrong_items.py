"""What is wrong with an item or a block is told by its place in the request, whatever stands before
it in the prompt; and a chain of responses has the limits of a request.
"""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import Asker, refused
from test_server_messages import COUNT, MESSAGES, post
from test_server_messages import refused as refused_message
from test_server_responses import respond
from tool_fakes import asking

ITEM = {"role": "user", "content": "Hi"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "x"}
WRONG_ITEMS: list[tuple[dict[str, Any], str]] = [
    (ITEM | {"role": "wizard"}, ".role"),
    (ITEM | {"content": None}, ".content"),
    (ITEM | {"content": ["x"]}, ".content[0]"),
    (ITEM | {"content": [{"type": "input_text", "text": "a"}, {"type": "x"}]}, ".content[1]"),
    (CALL | {"arguments": "[1]"}, ".arguments"),
    (CALL | {"name": None}, ".name"),
    (RESULT | {"output": 5}, ".output"),
]


@pytest.mark.parametrize(("item", "where"), WRONG_ITEMS)
async def test_a_wrong_item_of_responses_is_found_where_the_client_wrote_it(
    ask: Asker, item: dict[str, Any], where: str
) -> None:
    """Whatever stands before it in the prompt: instructions, items of earlier responses, calls that
    are one message with others.
    """
    first = (await respond(ask)).json()["id"]
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]}
    for fields in ({}, {"instructions": "x"}, {"previous_response_id": first}):
        for before in ([], [ITEM], [thought, CALL, CALL, RESULT]):
            param = f"input[{len(before)}]{where}"
            error = refused(await respond(ask, input=[*before, item], **fields))
            assert error["param"] == param and param in error["message"]


async def test_a_chain_of_responses_is_no_longer_than_one_request() -> None:
    async with asking(max_messages=5) as ask:
        assert refused(await respond(ask, input=[ITEM] * 6))["param"] == "input"
        ids = [None]
        for _ in range(2):
            answer = await respond(ask, input=[ITEM], previous_response_id=ids[-1])
            ids.append(answer.json()["id"])
        assert (await respond(ask, input="x", previous_response_id=ids[-1])).status_code == 200
        error = refused(await respond(ask, input=[ITEM] * 2, previous_response_id=ids[-1]))
        assert error["param"] == "input" and "5 are taken (--max-messages)" in error["message"]


TEXT = {"type": "text", "text": "Hi"}
USE = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
DONE = {"type": "tool_result", "tool_use_id": "c", "content": "x"}
WRONG_CONTENT: list[tuple[str, Any, str]] = [
    ("user", None, "content"),
    ("user", 3, "content"),
    ("assistant", None, "content"),
    ("user", [TEXT, DONE, {"type": "image"}], "content[2]"),
    ("user", [DONE, TEXT, {"type": "text"}], "content[2].text"),
    ("user", [DONE, DONE | {"content": 3}], "content[1].content"),
    ("user", [DONE | {"content": [TEXT, {"type": "image"}]}], "content[0].content[1]"),
    ("user", [DONE, {"type": "tool_result"}], "content[1].tool_use_id"),
    ("assistant", [USE, {"type": "thinking", "thinking": "a"}, {"type": "x"}], "content[2]"),
    ("assistant", [TEXT, USE | {"input": 3}], "content[1].input"),
]


@pytest.mark.parametrize(("role", "content", "where"), WRONG_CONTENT)
async def test_a_wrong_block_of_messages_is_found_where_the_client_wrote_it(
    ask: Asker, role: str, content: Any, where: str
) -> None:
    """Whatever stands before it in the prompt."""
    uses = [{"role": "assistant", "content": [USE, USE]}, {"role": "user", "content": [DONE, DONE]}]
    message = {"role": role, "content": content}
    for system in ({}, {"system": "x"}, {"system": [TEXT]}):
        for before in ([], [{"role": "user", "content": "Hi"}], uses):
            for path in (MESSAGES, COUNT):
                error = refused_message(
                    await post(ask, path, messages=[*before, message], **system)
                )
                assert f"messages[{len(before)}].{where} " in error["message"]
    error = refused_message(await post(ask, system=[TEXT, {"type": "image"}]))
    assert error["message"].startswith("system[1] ")
