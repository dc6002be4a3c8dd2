"""HTTP around the APIs: content types, bad JSON, limits, routes, keys, ids, statuses."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_fakes import CHAT, COMPLETIONS, Asker, FakeClient, make_state, refused

from tokenspeed.engine.messages import Loading, Stats

GOOD = json.dumps({"prompt": "Hi", "max_tokens": 2}).encode()

CONTENT_TYPES: list[tuple[str | None, int]] = [
    (None, 200),
    ("application/json", 200),
    ("APPLICATION/JSON", 200),
    ("application/json; charset=utf-8", 200),
    ("application/vnd.x+json", 200),
    ("application/x-www-form-urlencoded", 415),
    ("multipart/form-data; boundary=x", 415),
    ("text/plain", 415),
    ("json", 415),
]


@pytest.mark.parametrize(("kind", "status"), CONTENT_TYPES)
async def test_content_types(ask: Asker, kind: str | None, status: int) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = await ask.http.post(COMPLETIONS, content=GOOD, headers=headers)
    if status == 200:
        assert answer.status_code == 200
    else:
        refused(answer, status)


BAD_BODIES = [
    b"",
    b" ",
    b'{"model":',
    b'{"prompt": "a"} x',
    b"\xef\xbb\xbf" + GOOD,
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b"[" * 100_000,
    b'{"a":' * 100_000,
    b"{'prompt': 1}",
    b"NaN",
]
NOT_OBJECTS = [b"[]", b"null", b"1", b'"text"', b"true"]


@pytest.mark.parametrize("body", [*BAD_BODIES, *NOT_OBJECTS], ids=lambda body: repr(body[:20]))
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_bad_json(ask: Asker, path: str, body: bytes) -> None:
    assert refused(await ask.http.post(path, content=body))["code"] == "invalid_json"


async def test_nesting_inside_fields_is_survived(ask: Asker) -> None:
    deep: Any = "x"
    for _ in range(300):
        deep = [deep]
    for fields in ({"metadata": deep}, {"messages": deep}, {"stop": deep}, {"logit_bias": deep}):
        assert (await ask.chat(**fields)).status_code in (200, 400)
    assert (await ask.chat(messages=[{"role": "user", "content": deep}])).status_code == 400


async def test_routes_and_methods(ask: Asker) -> None:
    for path in (COMPLETIONS, CHAT):
        answer = await ask.http.get(path)
        refused(answer, 405)
        assert answer.headers["allow"] == "POST"
    answer = await ask.http.post("/v1/models", content=b"{}")
    refused(answer, 405)
    assert "GET" in answer.headers["allow"]
    for path in (
        "/v1",
        "/v1/models/",
        "/v1/nothing",
        "/v1/completions/",
        "/docs",
        "/v1//completions",
    ):
        refused(await ask.http.get(path), 404)
    long = refused(await ask.http.get("/" + "x" * 5000), 404)
    assert len(long["message"]) < 300


async def test_bodies_above_the_limit() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, max_request_bytes=2048))
    body = json.dumps({"prompt": "Hi", "user": "x" * 4000}).encode()
    answer = await ask.http.post(COMPLETIONS, content=body)
    refused(answer, 413)

    async def chunks() -> Any:
        for start in range(0, len(body), 512):
            yield body[start : start + 512]

    refused(await ask.http.post(COMPLETIONS, content=chunks()), 413)
    await ask.check_alive()


async def test_keys() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("first", "zw\u00e9ite")))
    for header in (None, "Bearer", "Bearer wrong", "Bearer firs", "Bearer first2", "Basic first"):
        headers = {} if header is None else {"authorization": header}
        for method, path in (
            ("POST", COMPLETIONS),
            ("POST", CHAT),
            ("GET", "/v1/models"),
            ("GET", "/version"),
            ("GET", "/nothing"),
            ("OPTIONS", CHAT),
            ("GET", "/health/"),
        ):
            answer = await ask.http.request(method, path, headers=headers, content=b"")
            assert refused(answer, 401)["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "first" not in answer.text
    for path in ("/health", "/ping", "/ready", "/metrics"):
        assert (await ask.http.get(path)).status_code == 200
    for key in (b"first", "zw\u00e9ite".encode()):
        headers = {b"authorization": b"Bearer " + key}
        assert (await ask.http.get("/v1/models", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-1.2:3_", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)],
)
async def test_request_ids(ask: Asker, given: str, kept: bool) -> None:
    for path in ("/health", "/nothing"):
        got = (await ask.http.get(path, headers={"x-request-id": given})).headers["x-request-id"]
        assert (got == given) is kept and 0 < len(got) <= 128


async def test_models(ask: Asker) -> None:
    listed = (await ask.http.get("/v1/models")).json()
    assert listed["object"] == "list" and [card["id"] for card in listed["data"]] == ["m", "alias"]
    card = (await ask.http.get("/v1/models/alias")).json()
    assert card["max_model_len"] == 256 and card["object"] == "model" and card["root"] == "m"
    assert card["parent"] is None
    error = refused(await ask.http.get("/v1/models/none"), 404)
    assert error["code"] == "model_not_found"
    for answer in (await ask.completion(model="x" * 9000), await ask.chat(model="gpt-9")):
        error = refused(answer, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await ask.chat(model="alias")).json()["model"] == "alias"
    assert (await ask.chat()).json()["model"] == "m"


async def test_version_and_health(ask: Asker) -> None:
    assert set((await ask.http.get("/version")).json()) == {"version"}
    for path in ("/health", "/ping"):
        answer = await ask.http.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await ask.http.get("/ready")).json() == {"status": "ready"}
    refused(await ask.http.get("/ready?level=all"), 400)


async def test_ready_with_all_graphs() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client))
    client.stats = Stats(graphs_to_come=3)
    assert (await ask.http.get("/ready")).status_code == 200
    answer = await ask.http.get("/ready?level=graphs")
    assert answer.status_code == 503 and answer.headers["retry-after"] == "5"
    assert answer.json() == {
        "status": "loading", "phase": "graphs", "detail": "3 CUDA graphs to come"
    }  # fmt: skip
    client.stats = Stats()
    assert (await ask.http.get("/ready?level=graphs")).json() == {"status": "ready"}


async def test_loading_draining_and_dead() -> None:
    client = FakeClient()
    state = make_state(client)
    ask = Asker(client, state)
    client.state, client.progress = "loading", Loading("weights", "1 of 2 MB")
    answer = await ask.http.get("/ready")
    assert answer.status_code == 503 and "retry-after" in answer.headers
    assert answer.json() == {"status": "loading", "phase": "weights", "detail": "1 of 2 MB"}
    for answer in (await ask.chat(), await ask.http.get("/v1/models")):
        error = refused(answer, 503)
        assert error["code"] == "loading" and "weights 1 of 2 MB" in error["message"]
        assert int(answer.headers["retry-after"]) > 0
    assert (await ask.http.get("/health")).status_code == 200
    client.state = "ready"
    state.draining = True
    assert (await ask.http.get("/ready")).json()["status"] == "draining"
    answer = await ask.completion()
    assert refused(answer, 503)["code"] == "draining" and "retry-after" in answer.headers
    state.draining = False
    await ask.check_alive()
    client.die()
    assert (await ask.http.get("/health")).status_code == 503
    assert (await ask.http.get("/ready")).json()["status"] == "dead"
    assert refused(await ask.completion(), 503)["code"] == "engine_dead"


async def test_full_queue_and_oversized_requests() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, max_num_seqs=2, max_queued_requests=2))
    assert refused(await ask.completion(n=5))["param"] == "n"
    ask.state.shared.queue.occupy(3, 0)
    answer = await ask.completion(n=2)
    assert refused(answer, 429)["code"] == "rate_limit_exceeded" and "retry-after" in answer.headers
    assert (await ask.completion(n=1)).status_code == 200
    ask.state.shared.queue.occupy(-3, 0)
    await ask.check_alive()


LARGE: dict[str, Any] = {
    "bad_words": [chr(97 + i % 26) * 120 for i in range(120)],
    "regex": "a|" * 9000 + "a",
    "stop": ["x" * 1000] * 60,
}


@pytest.mark.parametrize("name", LARGE)
async def test_large_parameters_count_for_each_sample(name: str) -> None:
    """They travel with every one of them."""
    client = FakeClient()
    ask = Asker(client, make_state(client, max_queued_tokens=20_000))
    fields = {name: LARGE[name], "prompt": "four"}
    assert (await ask.completion(**fields, n=1)).status_code == 200
    error = refused(await ask.completion(**fields, n=128))
    assert "--max-queued-tokens" in error["message"] and error["param"] == "n"
    assert (await ask.completion(prompt="four", n=128)).status_code == 200
    await ask.http.aclose()


async def test_prompt_tokens_in_the_queue_are_limited() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, max_queued_tokens=20))
    answer = await ask.completion(prompt=["four", "more"], n=3)  # 24 tokens
    assert "(--max-queued-tokens)" in refused(answer)["message"]
    client.gate.clear()
    first = asyncio.create_task(ask.completion(prompt="four", n=3))
    await asyncio.sleep(0.05)
    answer = await ask.completion(prompt="nine char")
    assert "--max-queued-tokens" in refused(answer, 429)["message"]
    client.gate.set()
    assert (await first).status_code == 200
    assert (await ask.completion(prompt="nine char")).status_code == 200
    await ask.check_alive()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_place_in_the_queue_is_taken_at_once(stream: bool) -> None:
    """Requests that arrive together do not all see the last place free."""
    client = FakeClient()
    ask = Asker(client, make_state(client, max_num_seqs=1, max_queued_requests=2))
    client.gate.clear()
    asked = [asyncio.create_task(ask.completion(stream=stream)) for _ in range(8)]
    await asyncio.sleep(0.1)
    client.gate.set()
    statuses = sorted([(await each).status_code for each in asked])
    assert statuses == [200] * 3 + [429] * 5
    await ask.check_alive()


async def test_an_unforeseen_error_says_nothing_of_itself(ask: Asker) -> None:
    engine = ask.engine
    ask.state.client = None
    answer = await ask.http.get("/ready")
    error = refused(answer, 500)
    assert "NoneType" not in answer.text and error["type"] == "server_error"
    ask.state.client = engine


async def test_engine_death_during_a_request() -> None:
    client = FakeClient()
    client.die_after = 2
    ask = Asker(client, make_state(client))
    answer = await ask.completion()
    assert refused(answer, 500)["code"] == "engine_dead"
    assert answer.headers["x-should-retry"] == "false"
    assert (await ask.http.get("/health")).status_code == 503


async def test_metrics(ask: Asker) -> None:
    await ask.completion(max_tokens=100)
    await ask.completion(max_tokens=2)
    await ask.http.get("/no/such/route/secret")
    await ask.http.request("BREW", "/health")
    answer = await ask.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.text
    for line in (
        'tokenspeed:num_requests_running{model_name="m"} 0.0',
        'tokenspeed:num_requests_waiting{model_name="m"} 0.0',
        'tokenspeed:kv_cache_usage_perc{model_name="m"} 0.0',
        'tokenspeed:generation_tokens_total{model_name="m"} 0.0',
        'tokenspeed:prefix_cache_hits_total{model_name="m"} 0.0',
        'tokenspeed:request_success_total{finished_reason="stop",model_name="m"} 1.0',
        'tokenspeed:request_success_total{finished_reason="length",model_name="m"} 1.0',
        'tokenspeed:time_to_first_token_seconds_count{model_name="m"} 2.0',
        'tokenspeed:request_prompt_tokens_sum{model_name="m"} 4.0',
        'tokenspeed:http_requests_total{method="POST",path="/v1/completions",status="200"} 2.0',
        'tokenspeed:http_requests_total{method="GET",path="unmatched",status="404"} 1.0',
        'tokenspeed:http_requests_total{method="other",path="/health",status="405"} 1.0',
        "tokenspeed:engine_up 1.0",
    ):
        assert line in text, line
    assert "secret" not in text and "tokenspeed:build_info{version=" in text


async def test_prompts_longer_than_a_thread_may_take() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, prompt_timeout=0.05))
    members: dict[str, Any] = {"source": "", "reads": lambda *_: False}
    members["render"] = lambda *_, **__: __import__("time").sleep(0.3)
    template = type("Endless", (), members)()
    good = ask.state.text
    ask.state.text = type(good)(good.tokenizer, template)
    error = refused(await ask.chat())
    assert error["param"] == "messages"
    assert "0.05" in error["message"] and "--prompt-timeout" in error["message"]
    ask.state.text = good
    assert (await ask.chat()).status_code == 200
    await ask.check_alive()
