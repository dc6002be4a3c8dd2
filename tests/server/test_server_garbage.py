"""A search for garbage stops all streams: tokens, of which there are most, are no cause of one."""

from __future__ import annotations

import gc
import json

from server_fakes import Asker


async def garbage_of(ask: Asker, num_tokens: int) -> int:
    """How many objects a streamed answer leaves to be found."""
    gc.collect()
    answer = await ask.chat(max_tokens=num_tokens, stream=True)
    blocks = answer.text.split("\n\n")[:-2]
    contents = [json.loads(each[6:])["choices"][0]["delta"].get("content") for each in blocks]
    assert sum(map(bool, contents)) == num_tokens, "one event a token"
    del answer
    return gc.collect()


async def test_tokens_leave_no_garbage(ask: Asker) -> None:
    ask.engine.answer = "x" * 90
    await garbage_of(ask, 5)
    few, many = await garbage_of(ask, 10), await garbage_of(ask, 80)
    assert many - few < 20
