"""Every field that clients are known to send: it has its effect, or is refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import (
    CHAT,
    COMPLETIONS,
    EOS,
    MAX_MODEL_LEN,
    TOKENIZER,
    VOCAB_SIZE,
    Asker,
    FakeClient,
    make_state,
    refused,
)

from tokenspeed.request import MAX_PRIORITY, GenerateRequest
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_completions import CompletionRequest
from tokenspeed.server.unsupported import UNSUPPORTED

REQUESTS = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest}
OPENAI_COMPLETIONS = """model prompt suffix max_tokens temperature top_p n best_of stream
    stream_options logprobs echo stop presence_penalty frequency_penalty logit_bias seed user"""
OPENAI_CHAT = """model messages tools tool_choice parallel_tool_calls response_format logprobs
    top_logprobs max_completion_tokens max_tokens n stop seed reasoning_effort metadata store
    service_tier stream stream_options temperature top_p presence_penalty frequency_penalty
    logit_bias user functions function_call modalities audio prediction web_search_options
    verbosity prompt_cache_key safety_identifier"""
EXTENSIONS = """top_k min_p repetition_penalty stop_token_ids include_stop_str_in_output ignore_eos
    min_tokens skip_special_tokens spaces_between_special_tokens add_special_tokens
    allowed_token_ids bad_words prompt_logprobs truncate_prompt_tokens return_token_ids cache_salt
    priority response_format structured_outputs guided_json guided_regex guided_choice
    guided_grammar request_id regex ebnf json_schema extra_key rid n_predict grammar cache_prompt
    n_probs add_generation_prompt continue_final_message chat_template_kwargs separate_reasoning
    chat_template documents logits_processors prompt_embeds use_beam_search length_penalty"""

PARAMS: dict[str, tuple[Any, Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (0.5, 0.5)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0.5, 0.5)),
    **dict.fromkeys(("include_stop_str_in_output", "ignore_eos"), (True, True)),
    "repetition_penalty": (1.5, 1.5),
    "top_k": (3, 3),
    "min_tokens": (2, 2),
    "max_tokens": (3, 3),
    "stop": (["zz", "y"], ("zz", "y")),
    "stop_token_ids": ([3], (3,)),
    "skip_special_tokens": (False, False),
    "logit_bias": ({"5": -100}, {5: -100.0}),
    "allowed_token_ids": ([5, 7], (5, 7)),
    "bad_words": (["ab"], ()),
    "prompt_logprobs": (2, 2),
}
"""Field -> (what is sent, what the engine's sampling parameters have)."""

Effect = Callable[[Any, GenerateRequest], bool]


def has_form(answer: Any, request: GenerateRequest) -> bool:
    return request.params.structured_outputs is not None


EFFECTS: dict[str, tuple[Any, Effect]] = {
    "model": ("alias", lambda answer, _: answer["model"] == "alias"),
    "best_of": (1, lambda answer, _: len(answer["choices"]) == 1),
    "n": (2, lambda answer, _: len(answer["choices"]) == 2),
    "seed": (9, lambda _, request: request.seed == 9),
    "cache_salt": ("s", lambda _, request: request.cache_salt == "s"),
    "priority": (0, lambda _, request: request.priority == 0),
    "truncate_prompt_tokens": (1, lambda _, request: len(request.prompt_ids) == 1),
    "return_token_ids": (True, lambda answer, _: answer["choices"][0]["token_ids"]),
    "response_format": ({"type": "json_object"}, has_form),
    "structured_outputs": ({"regex": "a"}, has_form),
    "guided_json": ({"type": "object"}, has_form),
    "json_schema": ({"type": "object"}, has_form),
    **dict.fromkeys(("guided_regex", "regex"), ("a", has_form)),
    **dict.fromkeys(("guided_grammar", "ebnf"), ('root ::= "a"', has_form)),
    "guided_choice": (["a"], has_form),
}
OF_COMPLETIONS: dict[str, tuple[Any, Effect]] = {
    "prompt": ([5, 6], lambda _, request: request.prompt_ids == [5, 6]),
    "echo": (True, lambda answer, _: answer["choices"][0]["text"].startswith("Hi")),
    "logprobs": (1, lambda answer, _: answer["choices"][0]["logprobs"]["top_logprobs"][0]),
}
OF_CHAT: dict[str, tuple[Any, Effect]] = {
    "max_completion_tokens": (3, lambda _, request: request.params.max_tokens == 3),
    "logprobs": (True, lambda answer, _: answer["choices"][0]["logprobs"]["content"]),
    "add_generation_prompt": (False, lambda _, request: b"assistant" not in said(request)),
}
WITHOUT_EFFECT = {
    *("user", "metadata", "store", "service_tier", "prompt_cache_key", "safety_identifier"),
}
"""Documented so in docs/api.md."""
TESTED_ELSEWHERE = {
    "stream": "test_server_streams.py",
    "stream_options": "test_server_text.py",
    "add_special_tokens": "test_server_prompts.py",
    "messages": "test_server_prompts.py",
    "continue_final_message": "test_server_prompts.py",
    "chat_template_kwargs": "test_server_prompts.py",
    "top_logprobs": "test_server_params.py",
    "tools": "test_server_tools.py",
    "tool_choice": "test_server_tool_requests.py",
    "parallel_tool_calls": "test_server_forced_calls.py",
    "reasoning_effort": "test_server_tool_requests.py",
    "separate_reasoning": "test_server_tool_requests.py",
}


def said(request: GenerateRequest) -> bytes:
    return b"".join(map(TOKENIZER.token_bytes, request.prompt_ids))


def effects(path: str) -> dict[str, tuple[Any, Effect]]:
    return EFFECTS | (OF_COMPLETIONS if path == COMPLETIONS else OF_CHAT)


async def send(ask: Asker, path: str, **fields: Any) -> httpx.Response:
    return await (ask.completion if path == COMPLETIONS else ask.chat)(**fields)


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize("name", PARAMS)
async def test_sampling_fields_reach_the_engine(ask: Asker, path: str, name: str) -> None:
    value, expected = PARAMS[name]
    answer = await send(ask, path, **{name: value})
    assert answer.status_code == 200, answer.text
    assert getattr(ask.engine.requests[0].params, name) == expected


@pytest.mark.parametrize(
    ("path", "name"), [(path, name) for path in REQUESTS for name in effects(path)]
)
async def test_fields_have_their_effect(ask: Asker, path: str, name: str) -> None:
    value, effect = effects(path)[name]
    answer = await send(ask, path, **{name: value})
    assert answer.status_code == 200, answer.text
    assert effect(answer.json(), ask.engine.requests[0])


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (path, name)
        for path, kind in REQUESTS.items()
        for name in UNSUPPORTED
        if name not in kind.__struct_fields__
    ],
)
async def test_what_cannot_be_had_is_refused_by_name(ask: Asker, path: str, name: str) -> None:
    error = refused(await send(ask, path, **{name: {"x": 1}}))
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    for harmless in (None, *UNSUPPORTED[name][0]):
        assert (await send(ask, path, **{name: harmless})).status_code == 200


@pytest.mark.parametrize("path", REQUESTS)
async def test_best_of_more_than_n_is_refused(ask: Asker, path: str) -> None:
    error = refused(await send(ask, path, best_of=2))
    assert (error["param"], error["code"]) == ("best_of", "unsupported_parameter")


@pytest.mark.parametrize("path", REQUESTS)
async def test_fields_without_effect_are_taken(ask: Asker, path: str) -> None:
    answer = await send(ask, path, **dict.fromkeys(WITHOUT_EFFECT, "x"))
    assert answer.status_code == 200 and not ask.state.field_warnings._seen


def test_every_field_stands_in_a_table() -> None:
    for path, kind in REQUESTS.items():
        known = set(kind.__struct_fields__)
        openai = OPENAI_COMPLETIONS if path == COMPLETIONS else OPENAI_CHAT
        dropped = {*openai.split(), *EXTENSIONS.split()} - known - UNSUPPORTED.keys()
        assert not dropped, path
        tried = {*PARAMS, *effects(path), *WITHOUT_EFFECT, *TESTED_ELSEWHERE}
        assert not known - tried, path
    for name, file in TESTED_ELSEWHERE.items():
        assert name in (Path(__file__).parent / file).read_text(), name


async def test_bad_words_are_spelled_in_tokens(ask: Asker) -> None:
    assert (await ask.completion(bad_words=["ab", " c "])).status_code == 200
    spelled = [tuple(TOKENIZER.encode(text)) for text in ("ab", " ab", "c", " c")]
    assert list(ask.engine.requests[0].params.bad_token_ids) == spelled


LONG = list(range(40))


@pytest.mark.parametrize(
    ("kept", "fields", "length"),
    [
        (7, {}, 7),
        (40, {}, 40),
        (999, {}, 40),
        (-1, {}, 40),
        (-1, {"prompt": "x" * 400, "max_tokens": 9}, MAX_MODEL_LEN - 9),
        (-1, {"prompt": "x" * 400}, MAX_MODEL_LEN - 16),
        (-1, {"prompt": "x" * 400, "max_tokens": 0, "echo": True}, MAX_MODEL_LEN),
    ],
)
async def test_truncated_prompts_keep_their_end(
    ask: Asker, kept: int, fields: dict[str, Any], length: int
) -> None:
    sent = {"prompt": LONG, "truncate_prompt_tokens": kept, "return_token_ids": True} | fields
    answer = (await ask.completion(**sent)).json()
    assert answer["usage"]["prompt_tokens"] == length
    prompt = ask.engine.requests[0].prompt_ids
    assert len(prompt) == length and answer["choices"][0]["prompt_token_ids"] == prompt
    if "prompt" not in fields:
        assert prompt == LONG[-length:]


async def test_the_echo_of_a_truncated_prompt_is_what_is_left(ask: Asker) -> None:
    answer = await ask.completion(
        prompt="abcdef", truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0
    )
    (choice,) = answer.json()["choices"]
    assert choice["text"] == "ef" and choice["logprobs"]["text_offset"] == [0, 1]


BANS: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 1025}, "allowed_token_ids"),
    ({"allowed_token_ids": TOKENIZER.encode("a"), "bad_words": ["a"]}, "bad_words"),
    ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"bad_words": "a"}, "bad_words"),
    ({"bad_words": ["a" * 129]}, "bad_words"),
    ({"bad_words": ["a"] * 129}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    ({"truncate_prompt_tokens": 1 << 31}, "truncate_prompt_tokens"),
]


@pytest.mark.parametrize("path", REQUESTS)
@pytest.mark.parametrize(("fields", "param"), BANS)
async def test_bans_that_cannot_hold(
    ask: Asker, path: str, fields: dict[str, Any], param: str
) -> None:
    assert refused(await send(ask, path, **fields))["param"].split("[")[0] == param


PRIORITIES: list[tuple[Any, str, int]] = [
    *((value, "priority", 200) for value in (0, None, -7, 3.0, MAX_PRIORITY, -MAX_PRIORITY)),
    *((value, "fcfs", 200) for value in (0, None, 0.0)),
    *((value, "fcfs", 400) for value in (1, -1)),
    *(
        (value, policy, 400)
        for value in (MAX_PRIORITY + 1, -(1 << 70), 1.5, "1", True)
        for policy in ("fcfs", "priority")
    ),
]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hi"},
    CHAT: {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9},
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("value", "policy", "status"), PRIORITIES)
async def test_priorities(path: str, value: Any, policy: str, status: int) -> None:
    client = FakeClient()
    ask = Asker(client, make_state(client, scheduling_policy=policy))
    answer = await ask.http.post(path, json=BODIES[path] | {"priority": value})
    assert answer.status_code == status, answer.text
    if status == 200:
        assert client.requests[-1].priority == int(value or 0)
    else:
        assert "priority" in answer.json()["error"]["message"]
        if value in (1, -1) and value is not True:
            assert "--scheduling-policy priority" in answer.json()["error"]["message"]
    await ask.check_alive()
    await ask.http.aclose()
