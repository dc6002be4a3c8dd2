"""Faults of other servers that no other file tries; tests/test_cases.py names them all."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import MAX_MODEL_LEN, TOKENIZER, Asker, refused
from test_server_text import events
from test_server_tools import GRID
from tool_fakes import TOOLS, as_folded, asking, folded

NEVER = ["Z" * 64, "</think>" + "Z" * 9, "<tool_call>" + "Z" * 9, "<|channel|>Z"]
"""Stop strings that never come, but may seem to for as long as a mark is."""


@pytest.mark.parametrize("name", GRID)
@pytest.mark.parametrize("chunk", [1, 3, 200])
async def test_a_stop_that_never_comes_moves_no_text(name: str, chunk: int) -> None:
    """It holds text back, and marks with it; reasoning, content and calls stay what they are."""
    options, text, _ = GRID[name]
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    async with asking(**options) as ask:
        ask.engine.chunk, found = chunk, []
        for stop in (None, NEVER):
            for streams in (False, True):
                ask.engine.answers = {0: text}
                answer = await ask.chat(**fields, stop=stop, stream=streams)
                message = folded(events(answer)) if streams else as_folded(answer)
                for call in message["calls"]:
                    call.pop("id")
                found.append(message)
        assert all(message == found[0] for message in found)
        assert "think>" not in found[0]["reasoning_content"] + found[0]["content"]


async def test_the_context_is_counted_alike_by_every_api(ask: Asker) -> None:
    """The longest prompt with a token of output is taken, and no longer one, whole or streamed."""
    empty = {"messages": [{"role": "user", "content": ""}]}
    frame = len((await ask.http.post("/tokenize", json=empty)).json()["tokens"])
    apis: list[tuple[str, str, Any, str]] = [
        ("/v1/chat/completions", "messages", None, "max_completion_tokens"),
        ("/v1/responses", "input", None, "max_output_tokens"),
        ("/v1/messages", "messages", None, "max_tokens"),
        ("/v1/completions", "prompt", "", "max_tokens"),
    ]
    for path, field, own, limit in apis:
        room = MAX_MODEL_LEN - 1 - (frame if own is None else 0)
        for size, status in ((room, 200), (room + 1, 400)):
            text = "x" * size
            prompt = [{"role": "user", "content": text}] if own is None else text
            for streams in (False, True):
                answer = await ask.http.post(
                    path, json={field: prompt, limit: 1, "stream": streams}
                )
                assert answer.status_code == status, (path, size, answer.text)
                if status == 400:
                    message = answer.json()["error"]["message"]
                    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in message
                    assert str(MAX_MODEL_LEN) in message.replace("maximum", "", 1)


@pytest.mark.parametrize("ids", [[99_999_999], [-1], [1 << 63], [1.5], [None], [True], "5"])
async def test_ids_that_are_none_are_refused_wherever_they_are_sent(ask: Asker, ids: Any) -> None:
    error = refused(await ask.http.post("/detokenize", json={"tokens": ids}))
    assert error["param"].split("[")[0] == "tokens"
    for field in ("allowed_token_ids", "stop_token_ids", "prompt"):
        if (field, ids) != ("prompt", "5"):
            assert refused(await ask.completion(**{field: ids}))["param"].split("[")[0] == field


async def test_every_chunk_is_new_text_and_none_all_of_it(ask: Asker) -> None:
    text = "one two three four five six"
    ask.engine.answer = text
    for kind in (ask.chat, ask.completion):
        chunks = events(await kind(stream=True, max_tokens=100))
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        pieces = [each.get("delta", {}).get("content", each.get("text")) or "" for each in choices]
        assert "".join(pieces) == text
        assert max(map(len, pieces)) == len(TOKENIZER.decode(TOKENIZER.encode(text)[:1]))
