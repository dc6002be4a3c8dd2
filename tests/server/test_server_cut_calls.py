"""Calls of messages that a limit cuts: their beginning in a stream, and no input after it."""

from __future__ import annotations

from typing import Any

from test_server_messages import NAMED_TOOLS, client_of, folded, post, same, told
from tool_fakes import HERMES_CALL, QWEN, asking


async def test_a_call_that_is_cut_has_no_input() -> None:
    async with asking(template=QWEN) as ask:
        ask.engine.answers = {0: HERMES_CALL}
        count = HERMES_CALL.index("Oslo")
        fields: dict[str, Any] = {"tools": NAMED_TOOLS, "max_tokens": count}
        whole = (await post(ask, **fields)).json()
        assert whole["stop_reason"] == "max_tokens"
        assert [block["input"] for block in whole["content"]] == [{}]
        events = told(await post(ask, stream=True, **fields))
        assert '{"city": "' == "".join(
            event["delta"]["partial_json"]
            for event in events
            if event["type"] == "content_block_delta"
        )
        assert same(folded(events)) == same(whole)


async def test_the_anthropic_client_takes_a_call_wherever_it_is_cut() -> None:
    arguments = '{"a": True, "b": -1.5e3, "c": "x\\n\\u00e9\\d", "d": [null, {"e": nonsense'
    text = f'<tool_call>{{"name": "now", "arguments": {arguments}'
    async with asking(template=QWEN) as ask:
        ask.engine.answers = {0: text}
        client = client_of(ask)
        turn: Any = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
        for count in range(text.index(arguments) + 1, len(text) + 1):
            fields: Any = turn | {"tools": NAMED_TOOLS, "max_tokens": count}
            async with client.messages.stream(**fields) as stream:
                message = await stream.get_final_message()
            (call,) = message.content
            assert (message.stop_reason, call.type) == ("max_tokens", "tool_use")
            assert set(call.input) <= set("abcd")
