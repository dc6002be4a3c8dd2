"""A stream that echoes a scored prompt writes it down in parts, none of which is long."""

from __future__ import annotations

from typing import Any

import pytest
from server_fakes import Asker
from test_server_text import events

from tokenspeed.server import logprobs


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("prompt", ["a", "abc", "Hi \u00e9\U0001fae0!", "abcdefg"])
async def test_a_scored_prompt_comes_in_parts(
    ask: Asker, monkeypatch: pytest.MonkeyPatch, prompt: str, max_tokens: int
) -> None:
    monkeypatch.setattr(logprobs, "MAX_AT_ONCE", 3)
    ask.engine.chunk = 100
    fields: dict[str, Any] = {"prompt": prompt, "echo": True, "logprobs": 2, "n": 2}
    fields |= {"max_tokens": max_tokens, "return_token_ids": True}
    whole = (await ask.completion(**fields)).json()
    chunks = events(await ask.completion(**fields, stream=True))
    num_prompt = len(prompt.encode())
    for choice in whole["choices"]:
        own = [
            each
            for chunk in chunks
            for each in chunk["choices"]
            if each["index"] == choice["index"]
        ]
        assert len(own) == -(-num_prompt // 3)
        assert all(len(each["logprobs"]["tokens"]) <= 3 + max_tokens for each in own)
        assert "".join(each["text"] for each in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            assert [value for each in own for value in each["logprobs"][name]] == values
        assert [id for each in own for id in each["token_ids"]] == choice["token_ids"]
        assert [each["finish_reason"] for each in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == choice["finish_reason"]
