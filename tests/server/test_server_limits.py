"""Limits in size, count, depth and time: each refusal names its option and value."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from typing import Any

import msgspec
import pytest
from server_fakes import CHAT, COMPLETIONS, asker, refused

from tokenspeed.request import SamplingParams
from tokenspeed.server import lifecycle
from tokenspeed.server.lifecycle import until_engine_dies


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "w"}}
COUNTS: list[tuple[str, str, int, dict[str, Any], dict[str, Any]]] = [
    (CHAT, "max_messages", 2, {"messages": [MESSAGE] * 2}, {"messages": [MESSAGE] * 3}),
    (CHAT, "max_tools", 1, {"messages": [MESSAGE], "tools": []}, {"tools": [TOOL] * 2}),
    (COMPLETIONS, "max_prompts", 2, {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}),
    (COMPLETIONS, "max_prompts", 2, {"prompt": [1] * 9}, {"prompt": [[1]] * 3}),
    (COMPLETIONS, "max_sequences", 4, {"prompt": ["a"] * 2, "n": 2}, {"prompt": "a", "n": 5}),
    # The body itself is a level.
    (COMPLETIONS, "max_json_depth", 8, {"prompt": "a", "metadata": nested(7)}, {"x": nested(8)}),
    (COMPLETIONS, "max_json_depth", 8, {"prompt": "a"}, {"x": [{"y": nested(300)}]}),
]


@pytest.mark.parametrize(("path", "name", "most", "good", "bad"), COUNTS)
async def test_counts_and_depth(
    path: str, name: str, most: int, good: dict[str, Any], bad: dict[str, Any]
) -> None:
    ask = asker(**{name: most})
    assert (await ask.http.post(path, json=good)).status_code == 200
    error = refused(await ask.http.post(path, json=bad))
    assert f"--{name.replace('_', '-')}" in error["message"] and str(most) in error["message"]
    if name != "max_json_depth":
        assert error["param"] in bad
    await ask.check_alive()


async def test_large_parameters_are_checked_and_measured_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However many prompts they are for: a millisecond for each stopped all others for seconds."""
    counts = {"checked": 0, "encoded": 0}
    check, encode = SamplingParams._check_bans, msgspec.msgpack.encode

    def count_checks(params: SamplingParams) -> None:
        counts["checked"] += 1
        check(params)

    def count_encodings(value: Any) -> bytes:
        counts["encoded"] += 1
        return encode(value)

    monkeypatch.setattr(SamplingParams, "_check_bans", count_checks)
    monkeypatch.setattr(msgspec.msgpack, "encode", count_encodings)
    ask, seen = asker(max_queued_tokens=1 << 20), []
    words = [f"{number:03}" + "x" * 61 for number in range(128)]
    body = {"bad_words": words, "prompt_logprobs": 1, "max_tokens": 1, "n": 2}
    for prompts in (["a"], ["a" * size for size in range(1, 9)], ["a"] * 1000):
        counts.update(checked=0, encoded=0)
        answer = await ask.completion(prompt=prompts, **body)
        assert answer.status_code == (200 if len(prompts) < 1000 else 400), answer.text
        seen.append(tuple(counts.values()))
    assert len(set(seen)) == 1, seen
    await ask.check_alive()


async def test_heads_above_the_limit() -> None:
    ask = asker(max_header_bytes=1024)
    for headers, path in (({"x-long": "x" * 1024}, "/health"), ({}, "/health?" + "x" * 1024)):
        error = refused(await ask.http.get(path, headers=headers), 431)
        assert "1024" in error["message"] and "--max-header-bytes" in error["message"]
    assert (await ask.http.get("/health", headers={"x-long": "x" * 500})).status_code == 200
    await ask.check_alive()


async def test_bodies_that_do_not_come_in_time() -> None:
    ask = asker(body_timeout=0.1)

    async def slow() -> Any:
        yield b'{"prompt": '
        await asyncio.sleep(0.5)
        yield b'"x"}'

    error = refused(await ask.http.post(COMPLETIONS, content=slow()), 408)
    assert "--body-timeout" in error["message"] and "0.1" in error["message"]
    await ask.check_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_that_take_too_long(stream: bool) -> None:
    ask = asker(request_timeout=0.1)
    ask.engine.gate.clear()
    answer = await ask.completion(stream=stream)
    if stream:
        event = answer.text.removeprefix("data: ").partition("\n")[0]
        error = json.loads(event)["error"]
        assert answer.text.endswith("data: [DONE]\n\n")
    else:
        error = refused(answer, 504)
        assert answer.headers["x-should-retry"] == "false"
    assert error["code"] == "timeout" and "--request-timeout" in error["message"]
    ask.engine.gate.set()
    await ask.check_alive()


async def test_an_engine_that_hangs_is_not_ready(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ready again as soon as a step ends; idle for as long as it likes."""
    monkeypatch.setattr(lifecycle, "DEATH_CHECK_S", 0.01)
    ask = asker(watchdog_timeout=0.1)
    watching = asyncio.create_task(until_engine_dies(ask.state))
    await asyncio.sleep(0.2)
    assert (await ask.http.get("/ready")).status_code == 200
    ask.engine.gate.clear()
    hanging = asyncio.create_task(ask.completion())
    await asyncio.sleep(0.05)
    assert (await ask.http.get("/ready")).status_code == 200
    caplog.set_level(logging.ERROR, "tokenspeed")
    await asyncio.sleep(0.2)
    answer = await ask.http.get("/ready")
    assert (answer.status_code, answer.json()["status"]) == (503, "stalled")
    assert (await ask.http.get("/health")).status_code == 200
    answer = await ask.completion()
    error = refused(answer, 503)
    assert error["code"] == "stalled" and "--watchdog-timeout" in error["message"]
    assert "retry-after" in answer.headers
    assert sum("--watchdog-timeout" in record.message for record in caplog.records) == 1
    ask.engine.stats_at = time.monotonic()
    assert (await ask.http.get("/ready")).status_code == 200
    ask.engine.gate.set()
    assert (await hanging).status_code == 200
    watching.cancel()
    await ask.check_alive()
