"""The real server, started as a user starts it, asked by the `openai` client and by raw sockets."""

from __future__ import annotations

import asyncio
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from served import Served

from tokenspeed.cli.main import main

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden_smollm2.json").read_text())
CAPITAL = GOLDEN["prompts"][0]
ANSWER = CAPITAL["runs"]["weights_gguf_fp32_compute_fp32"]["text"]


def ask(client: openai.OpenAI, **options: Any) -> Any:
    options = {"model": "smollm2", "messages": CAPITAL["messages"], "temperature": 0} | options
    return client.chat.completions.create(**options)


def test_chat_equals_golden_streamed_and_not(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert whole.choices[0].message.content == ANSWER
    assert whole.choices[0].finish_reason == "stop"
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == ANSWER
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.prompt_tokens == len(CAPITAL["prompt_ids"])
        assert usage.completion_tokens == 8


def test_structured_output_is_valid_streamed_and_not(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
        "required": ["city", "big"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": schema}}
    (whole,) = ask(client, response_format=form, max_tokens=150).choices
    assert whole.finish_reason == "stop"
    assert set(json.loads(whole.message.content)) == {"city", "big"}
    chunks = list(ask(client, response_format=form, max_tokens=150, stream=True))
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole.message.content
    bad = {"type": "json_schema", "json_schema": {"name": "bad", "schema": {"type": "str"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="Invalid type: str"):
            ask(client, response_format=bad, stream=stream)
    assert ask(client).choices[0].message.content == ANSWER


def test_completion_of_token_ids_with_logprobs(client: openai.OpenAI) -> None:
    golden = CAPITAL["runs"]["weights_bf16_compute_fp32"]["ids_ignore_eos"]
    answer = client.completions.create(
        model="smollm2",
        prompt=CAPITAL["prompt_ids"],
        max_tokens=4,
        temperature=0,
        logprobs=2,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.model_extra["token_ids"] == golden[:4]
    assert choice.finish_reason == "length"
    assert len(choice.logprobs.token_logprobs) == 4
    assert choice.logprobs.token_logprobs[0] == pytest.approx(-1.88268, abs=1e-3)


def test_bench_serve_measures_it(server: str, tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    words = ["bench", "serve", "--base-url", server, "--output-json", str(result)]
    words += ["--save-detailed", "--dataset-name", "multi-turn", "--num-turns", "2"]
    words += ["--think-time", "0.01", "--num-prompts", "3", "--max-concurrency", "2"]
    words += ["--random-input-len", "24", "--turn-input-len", "4", "--random-output-len", "5"]
    assert main([*words, "--ignore-eos", "--goodput", "e2el:60000"]) == 0
    found = json.loads(result.read_bytes())
    assert (found["completed"], found["failed"], found["model_id"]) == (6, 0, "smollm2")
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (3 * (24 + 33), 30)
    assert found["request_goodput"] == found["request_throughput"] > 0
    for record in found["requests"]:
        assert sum(record["chunk_tokens"]) == record["output_len"] == 5
        assert 0 < record["chunk_times"][0] <= record["latency"] < found["duration"]


def test_samples_stop_and_seed(client: openai.OpenAI) -> None:
    first = ask(client, n=3, seed=7, temperature=1.0, max_tokens=12)
    again = ask(client, n=3, seed=7, temperature=1.0, max_tokens=12)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert [choice.index for choice in first.choices] == [0, 1, 2] and len(set(texts)) > 1
    cut = ask(client, stop=[" of France", "Paris"])
    assert cut.choices[0].message.content == "The capital"
    assert cut.choices[0].finish_reason == "stop"


def test_salts_share_no_cache(client: openai.OpenAI) -> None:
    """Each salt begins without what another, or none, has left; the answer is the same."""
    story, cached = "Once upon a time there was a ship. " * 9, []
    texts = set()
    for salt in ("x", "x", "y", None, "x", None):
        extra = {} if salt is None else {"cache_salt": salt}
        answer = client.completions.create(
            model="smollm2", prompt=story, max_tokens=4, temperature=0, extra_body=extra
        )
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
        texts.add(answer.choices[0].text)
    assert [count > 0 for count in cached] == [False, True, False, False, True, True]
    assert len(texts) == 1


def test_a_next_turn_by_text_or_by_ids(client: openai.OpenAI) -> None:
    """What was generated may be cut into other tokens when it comes back as text: fewer of them are
    found in the cache, and the answer is that of a cold one. Ids come back as they were.
    """
    first = ask(client, max_tokens=20, extra_body={"return_token_ids": True})
    said = first.choices[0]
    more = [{"role": "assistant", "content": said.message.content}]
    more += [{"role": "user", "content": "And of Spain?"}]
    turns = [
        ask(client, messages=[*CAPITAL["messages"], *more], extra_body=extra)
        for extra in ({}, {"cache_salt": "cold"})
    ]
    warm, cold = (turn.usage.prompt_tokens_details.cached_tokens for turn in turns)
    assert warm > cold == 0
    assert turns[0].choices[0].message.content == turns[1].choices[0].message.content
    ids = [*first.model_extra["prompt_token_ids"], *said.model_extra["token_ids"]]
    again = client.completions.create(model="smollm2", prompt=[*ids, 5, 6], max_tokens=2)
    assert again.usage.prompt_tokens == len(ids) + 2
    assert again.usage.prompt_tokens_details.cached_tokens >= len(ids) // 16 * 16 - 16


def test_refusals_have_openai_shape(server: str, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is 8192 tokens"):
        ask(client, max_tokens=9000)
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        ask(client, model="gpt-9")
    body = '{"model": "smollm2", "messages": [{"role": "user", "content": "x"}], "top_p": NaN}'
    answer = httpx.post(f"{server}/v1/chat/completions", content=body)
    assert answer.status_code == 400 and answer.json()["error"]["message"]
    assert ask(client).choices[0].message.content == ANSWER


def test_plain_routes(running: Served, server: str) -> None:
    models = httpx.get(f"{server}/v1/models").json()
    assert models["data"][0]["id"] == "smollm2" and models["data"][0]["max_model_len"] == 8192
    assert httpx.get(f"{server}/health").status_code == 200
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", httpx.get(f"{server}/version").json()["version"])
    assert running.gauge("generation_tokens_total") > 0
    for name in ("request_queue_time_seconds", "iteration_tokens_total"):
        assert running.gauge(f"{name}_count") > 0
    assert "<title>TokenSpeed</title>" in httpx.get(server).text
    status = httpx.get(f"{server}/page/status").json()
    assert status["phase"] == "ready" and status["stats"]["generation_tokens"] > 0


def test_answers_do_not_depend_on_the_crowd(server: str) -> None:
    async def crowd() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server}/v1", api_key="none", max_retries=0
        ) as client:
            asks = [
                client.chat.completions.create(
                    model="smollm2",
                    messages=prompt["messages"],
                    temperature=0,
                    max_tokens=16,
                )
                for prompt in GOLDEN["prompts"] * 4
            ]
            return [answer.choices[0].message.content for answer in await asyncio.gather(*asks)]

    texts = asyncio.run(crowd())
    for case in range(3):
        assert len(set(texts[case::3])) == 1
    assert texts[0] == ANSWER


def test_a_hundred_disconnecting_clients_leave_nothing(
    running: Served, server: str, client: openai.OpenAI
) -> None:
    running.wait_idle()
    idle = running.gauge("kv_cache_usage_perc")

    async def leave(index: int) -> None:
        body = {
            "model": "smollm2",
            "messages": CAPITAL["messages"],
            "max_tokens": 4000,
            "stream": index % 2 == 0,
            "ignore_eos": True,
        }
        async with httpx.AsyncClient(timeout=60) as http:
            try:
                async with (
                    asyncio.timeout(0.3 + index * 0.02),
                    http.stream("POST", f"{server}/v1/chat/completions", json=body) as answer,
                ):
                    async for _ in answer.aiter_raw():
                        if index % 4 == 0:
                            return
            except TimeoutError:
                pass

    async def crowd() -> None:
        await asyncio.gather(*(leave(index) for index in range(100)))

    asyncio.run(crowd())
    running.wait_idle()
    assert running.gauge("kv_cache_usage_perc") == idle
    assert ask(client).choices[0].message.content == ANSWER


def test_the_server_listens_on_loopback_only(server: str) -> None:
    port = int(server.rsplit(":", 1)[1])
    listening = []
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and int(address.split(":")[1], 16) == port:
            listening.append(address.split(":")[0])
    assert listening == ["0100007F"]
    assert os.path.exists("/proc/net/tcp6")
    for line in Path("/proc/net/tcp6").read_text().splitlines()[1:]:
        assert int(line.split()[1].split(":")[1], 16) != port or line.split()[3] != "0A"
