"""Calls that generate nothing: tokens and prompts, what the operator may ask for, the document."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import msgspec
import pytest
from server_fakes import CHAT, COMPLETIONS, TOKENIZER, Asker, FakeClient, make_state, refused
from test_server_text import events
from tool_fakes import QWEN, TOOLS, asking

from tokenspeed.server.api import APIS
from tokenspeed.server.app import create_app
from tokenspeed.server.calls import CALLS
from tokenspeed.server.info import INFO_ROUTES
from tokenspeed.server.page_routes import PAGE_PATHS

TEXT = "Hi \u00e9\U0001fae0<|im_end|>"


async def test_tokens_and_text_go_both_ways(ask: Asker) -> None:
    for name in ("prompt", "content", "text", "inputs"):
        answer = await ask.http.post("/tokenize", json={name: TEXT, "return_token_strs": True})
        told = answer.json()
        assert told["tokens"] == TOKENIZER.encode(TEXT)
        assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), 256)
        assert told["token_strs"][0] == "H" and len(told["token_strs"]) == told["count"]
    back = await ask.http.post("/detokenize", json={"tokens": told["tokens"]})
    assert back.json() == {"prompt": TEXT}
    assert (await ask.http.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    assert (await ask.http.post("/tokenize", json={"prompt": ""})).json()["tokens"] == []
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "text": "b"}, "prompt"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1 << 70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ):
        assert refused(await ask.http.post(path, json=body))["param"].startswith(param), body
    refused(await ask.http.post("/tokenize", json={"prompt": "a", "model": "other"}), 404)
    assert not ask.engine.requests


async def test_rendered_prompts_are_those_of_requests() -> None:
    async with asking(template=QWEN) as ask:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
        for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": ["Hi", "you"]})):
            rendered = (await ask.http.post(f"{path}/render", json=body)).json()
            assert not ask.engine.requests
            await ask.http.post(path, json=body)
            sent = [request.prompt_ids for request in ask.engine.requests]
            assert [prompt["token_ids"] for prompt in rendered["prompts"]] == sent
            assert all(
                prompt["text"] == TOKENIZER.decode(ids, skip_special_tokens=False)
                for prompt, ids in zip(rendered["prompts"], sent, strict=True)
            )
            ask.engine.requests.clear()
        tokens = (await ask.http.post("/tokenize", json=chat)).json()["tokens"]
        rendered = (await ask.http.post(f"{CHAT}/render", json=chat)).json()
        assert tokens == rendered["prompts"][0]["token_ids"]
        ids = (await ask.http.post(f"{COMPLETIONS}/render", json={"prompt": [5, 6]})).json()
        assert ids["prompts"] == [{"text": None, "token_ids": [5, 6]}]


@pytest.mark.parametrize("max_tokens", [9, None])
@pytest.mark.parametrize("kept", [5, -1])
async def test_rendered_prompts_are_cut_as_those_of_requests(
    ask: Asker, kept: int, max_tokens: int | None
) -> None:
    cut = {"truncate_prompt_tokens": kept, "max_tokens": max_tokens}
    messages = [{"role": "user", "content": "one two " * 50}]
    for path, body in (
        (CHAT, {"messages": messages}),
        (CHAT, {"messages": messages, "max_completion_tokens": 7}),
        (COMPLETIONS, {"prompt": ["one two " * 50, "Hi"]}),
        (COMPLETIONS, {"prompt": list(range(20))}),
    ):
        rendered = (await ask.http.post(f"{path}/render", json=body | cut)).json()["prompts"]
        await ask.http.post(path, json=body | cut)
        sent = [request.prompt_ids for request in ask.engine.requests]
        assert [prompt["token_ids"] for prompt in rendered] == sent
        for prompt, ids in zip(rendered, sent, strict=True):
            is_text = path == CHAT or isinstance(body["prompt"][0], str)
            whole = TOKENIZER.decode(ids, skip_special_tokens=False) if is_text else None
            assert prompt["text"] == whole
        ask.engine.requests.clear()


async def test_what_could_not_be_served_is_not_rendered(ask: Asker) -> None:
    for body, param in (
        ({"prompt": "x" * 400}, "prompt"),
        ({"prompt": [5, 6], "max_tokens": 255}, "prompt"),
        ({"prompt": [5, 1 << 20]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": "x", "temperature": 9}, "temperature"),
    ):
        for path in (f"{COMPLETIONS}/render", COMPLETIONS):
            assert refused(await ask.http.post(path, json=body))["param"] == param, body


async def test_the_operator_needs_a_key(ask: Asker) -> None:
    paths = ("/flush_cache", "/abort_request", "/pause_generation", "/continue_generation")
    for path in (*paths, "/start_profile", "/stop_profile"):
        answer = await ask.http.post(path, json={"abort_all": True} if "abort" in path else {})
        assert refused(answer, 403)["code"] == "key_required"
    assert not ask.engine.commands.asked


async def test_the_operator_flushes_pauses_and_aborts() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("k",)))
    refused(await ask.http.post("/flush_cache"), 401)
    ask.http.headers["authorization"] = "Bearer k"
    assert (await ask.http.post("/flush_cache")).json() == {"num_pages": 7}

    assert (await ask.http.post("/pause_generation")).json() == {"is_paused": True}
    ready = await ask.http.get("/ready")
    assert (ready.status_code, ready.json()["status"]) == (503, "paused")
    waiting = [asyncio.create_task(ask.completion(max_tokens=100)) for _ in range(2)]
    streaming = asyncio.create_task(ask.chat(stream=True))
    while len(client.running) < 3:
        await asyncio.sleep(0.01)
    assert refused(await ask.http.post("/abort_request", json={}))["param"] == "rid"
    rid = next(id for id in client.running if id.startswith("cmpl-")).rpartition("-")[0]
    assert (await ask.http.post("/abort_request", json={"rid": rid})).json() == {"num_requests": 1}
    assert (await ask.http.post("/abort_request", json={"rid": rid})).json() == {"num_requests": 0}
    (ended,) = (await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED))[0]
    assert refused(ended.result(), 503)["code"] == "aborted"
    assert ended.result().headers["x-should-retry"] == "false"
    client.commands.num_foreign = 3
    answer = (await ask.http.post("/abort_request", json={"abort_all": True})).json()
    assert answer == {"num_requests": 2 + 3}
    assert events(await streaming)[-1]["error"]["code"] == "aborted"
    await asyncio.gather(*waiting)

    late = asyncio.create_task(ask.completion(max_tokens=100))
    while not client.running:
        await asyncio.sleep(0.01)
    assert (await ask.http.post("/continue_generation")).json() == {"is_paused": False}
    assert (await late).json()["choices"][0]["text"] == client.answer
    aborts = ["abort"] * 3
    assert client.commands.asked == ["flush_cache", "pause", *aborts, "continue"]
    assert (await ask.http.get("/ready")).status_code == 200
    await ask.check_alive()
    await ask.http.aclose()


async def test_an_operator_who_does_not_wait_is_obeyed() -> None:
    """The command is on its way: what the server says of itself is what the engine does."""
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("k",)))
    ask.http.headers["authorization"] = "Bearer k"
    obey = client.commands.ask

    async def slow(*given: Any) -> Any:
        await obey(*given)
        await asyncio.Event().wait()

    client.commands.ask = slow  # type: ignore[method-assign]
    for path, status in (("pause", "paused"), ("continue", "ready")) * 2:
        asked = len(client.commands.asked)
        leaving = asyncio.create_task(ask.http.post(f"/{path}_generation"))
        while len(client.commands.asked) == asked:
            await asyncio.sleep(0.01)
        leaving.cancel()
        await asyncio.wait([leaving])
        assert (await ask.http.get("/ready")).json()["status"] == status
    await ask.check_alive()
    await ask.http.aclose()


async def test_settings_are_shown_without_secrets() -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("s3cret",), max_num_seqs=3))
    ask.http.headers["authorization"] = "Bearer s3cret"
    answer = await ask.http.get("/server_info")
    told = answer.json()
    assert told["settings"]["scheduler"]["max_num_seqs"] == 3
    assert told["settings"]["model"]["dtype"] == "half", "as the engine has settled it"
    assert told["settings"]["server"]["port"] == 8000
    assert told["reasons"] == {"dtype": "a test says so"}
    assert (told["models"], told["max_model_len"]) == (["m", "alias"], 256)
    assert "s3cret" not in answer.text and "api_key" not in told["settings"]["server"]
    await ask.http.aclose()


@pytest.mark.parametrize("strict", [False, True])
async def test_what_is_not_offered_says_why_and_no_more(
    strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever clients ask with it: the field is not what is wrong."""
    client = FakeClient()
    ask = Asker(client, make_state(client, strict_fields=strict))
    body = {"input": ["x"], "model": "m", "encoding_format": "base64", "dimensions": 8}
    error = refused(await ask.http.post("/v1/embeddings", json=body))
    assert (error["code"], error["param"]) == ("unsupported_operation", None)
    assert not caplog.records
    await ask.http.aclose()


async def test_the_operator_has_steps_profiled() -> None:
    """The engine records them, or says why not. A client names no path."""
    client = FakeClient()
    ask = Asker(client, make_state(client, api_key=("k",)))
    ask.http.headers["authorization"] = "Bearer k"
    for body, num_steps in (({}, 16), ({"num_steps": 3}, 3), ({"num_steps": 256}, 256)):
        told = (await ask.http.post("/start_profile", json=body)).json()
        assert told == {"path": "/traces/one.json", "num_steps": num_steps}
    for bad in (0, -1, 257, 1 << 70, 1.5, "3"):
        answer = await ask.http.post("/start_profile", json={"num_steps": bad})
        assert "num_steps" in refused(answer)["message"]
    error = refused(await ask.http.post("/stop_profile"))
    assert (error["message"], error["code"]) == ("profile: a test says so", "unsupported_operation")
    assert client.commands.asked == ["start_profile"] * 3 + ["stop_profile"]
    await ask.check_alive()
    await ask.http.aclose()


def references(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*map(references, node.values()))
    return set().union(*map(references, node)) if isinstance(node, list) else set()


async def test_the_document_is_whole_and_current(ask: Asker) -> None:
    told = (await ask.http.get("/openapi.json")).json()
    assert told["openapi"] == "3.1.0" and {"title", "version"} <= told["info"].keys()
    schemas = told["components"]["schemas"]
    assert references(told) == {f"#/components/schemas/{name}" for name in schemas}
    app: Any = create_app(ask.state)
    while not hasattr(app, "routes"):
        app = app._app
    routes = {
        (re.sub(r":\w+}", "}", route.path), method.lower())
        for route in app.routes
        for method in route.methods - {"HEAD"}
        if route.path not in PAGE_PATHS
    }
    operations = {
        (path, method): operation
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    }
    assert operations.keys() == routes
    ids = [operation["operationId"] for operation in operations.values()]
    assert len(set(ids)) == len(ids)
    for (path, method), operation in operations.items():
        assert operation["summary"] and {"200", "default"} <= operation["responses"].keys()
        names = set(re.findall(r"{(\w+)}", path))
        assert {each["name"] for each in operation.get("parameters", ())} == names
        assert ("requestBody" in operation) == (method == "post")
    for row in (*APIS.values(), *CALLS):
        name = row.request.__name__
        body = operations[row.path, "post"]["requestBody"]["content"]["application/json"]
        assert body["schema"] == {"$ref": f"#/components/schemas/{name}"}
        assert set(schemas[name]["properties"]) == set(row.request.__struct_fields__)
    assert not [
        route for route in INFO_ROUTES if route.answer and route.answer.__name__ not in schemas
    ]


async def test_answers_are_of_the_types_that_the_document_names(ask: Asker) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    bodies = {
        CHAT: {"messages": messages, "logprobs": True},
        COMPLETIONS: {"prompt": "Hi", "logprobs": 1},
        "/v1/responses": {"input": "Hi"},
        "/v1/messages": {"messages": messages, "max_tokens": 9},
    }
    for path, api in APIS.items():
        answer = await ask.http.post(path, json=bodies[path])
        assert json.loads(answer.content) == msgspec.to_builtins(
            msgspec.json.decode(answer.content, type=api.answer)
        )
