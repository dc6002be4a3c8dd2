"""Streams of the real server add up to its whole answers, whatever shapes the sampling: text, ids,
log-probabilities, ends and usage.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

BASE: dict[str, Any] = {"n": 2, "seed": 3, "temperature": 1.0, "max_tokens": 12}
BASE |= {"return_token_ids": True}
SCHEMA = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0, "max_tokens": 40},
    {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_tokens": 8, "stop": ["a", "e"]},
    {"ignore_eos": True, "top_k": 5, "min_p": 0.01, "top_p": 0.9},
    {"stop": [" the", "is", ","], "include_stop_str_in_output": True},
    {"logit_bias": {"28": 5}, "bad_words": ["the", "is"], "max_tokens": 1},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    {"structured_outputs": {"regex": "[0-9]{2} \U0001fae0\u9f9c"}},
]
CHAT = {"messages": [{"role": "user", "content": "Name a city."}], "logprobs": True}
CHAT |= {"top_logprobs": 2}
COMPLETION = {"prompt": ["The city is", "1, 2,"], "logprobs": 2, "echo": True}
ROUTES = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION}


def scores(logprobs: Any) -> list[Any]:
    """The entries of a choice's log-probabilities, in either form: tokens, then numbers."""
    if "content" in logprobs:
        return [
            ([each["token"], *(top["token"] for top in each["top_logprobs"])], each["logprob"])
            for each in logprobs["content"]
        ]
    tops = [sorted(top or ()) for top in logprobs["top_logprobs"]]
    values = [0.0 if value is None else value for value in logprobs["token_logprobs"]]
    shown = zip(logprobs["tokens"], logprobs["text_offset"], tops, strict=True)
    return list(zip(shown, values, strict=True))


def whole_choice(choice: dict[str, Any]) -> dict[str, Any]:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    return {
        "text": text,
        "ids": choice["token_ids"],
        "scores": scores(choice["logprobs"]),
        "end": (choice["finish_reason"], choice["stop_reason"]),
    }


def streamed_choice(parts: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"text": "", "ids": [], "scores": [], "end": None}
    for part in parts:
        assert found["end"] is None
        found["text"] += part["delta"].get("content", "") if "delta" in part else part["text"]
        found["ids"] += part.get("token_ids", [])
        found["scores"] += scores(part["logprobs"]) if part["logprobs"] else []
        if part["finish_reason"] is not None:
            found["end"] = part["finish_reason"], part["stop_reason"]
    return found


async def compare(http: httpx.AsyncClient, path: str, fields: dict[str, Any]) -> None:
    body = {**BASE, **ROUTES[path], **fields}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    stream = (await http.post(path, json=body | options)).text.split("\n\n")
    assert stream[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(each.removeprefix("data: ")) for each in stream[:-2]]
    usage = chunks.pop()["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage[name] == whole["usage"][name], fields  # cached tokens are more by now
    for choice in whole["choices"]:
        expected = whole_choice(choice)
        parts = [each for chunk in chunks for each in chunk["choices"]]
        found = streamed_choice([each for each in parts if each["index"] == choice["index"]])
        values = [[value for _, value in each["scores"]] for each in (found, expected)]
        assert values[0] == pytest.approx(values[1], abs=1e-3), fields
        for each in (found, expected):
            each["scores"] = [token for token, _ in each["scores"]]
        assert found == expected, fields


async def test_streams_add_up(server: str) -> None:
    async with httpx.AsyncClient(base_url=server, timeout=120) as http:
        await asyncio.gather(*(compare(http, path, each) for path in ROUTES for each in CASES))
