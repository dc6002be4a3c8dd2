"""Fields of a request: what is taken, what is refused, and how the refusal names the field."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from server_fakes import (
    CHAT,
    COMPLETIONS,
    TOKENIZER,
    VOCAB_SIZE,
    Asker,
    FakeClient,
    make_state,
    refused,
)

BAD: list[tuple[str, str]] = [
    *((name, value) for name in ("temperature", "top_p", "min_p") for value in ("NaN", "1e999")),
    *((f"{name}_penalty", v) for name in ("presence", "frequency") for v in ("NaN", "-2.1", "3")),
    *(("repetition_penalty", value) for value in ("0", "-1", "1e6", "NaN", "Infinity")),
    *(("temperature", value) for value in ("-1", "3", "-Infinity", '"0.7"', "true", "[1]", "{}")),
    *(("top_p", value) for value in ("0", "-0.1", "1.1")),
    ("min_p", "1.1"),
    *(("top_k", value) for value in ("-2", "1000000000", "1.5", "true")),
    *(("n", value) for value in ("0", "-1", "1000000000", "1.5", "true", '"2"', "1e300")),
    *(("max_tokens", value) for value in ("-1", "1000000000000000000", "0", "2.5", '"8"')),
    *(("seed", value) for value in ("-1", "18446744073709551616", "1.5", '"7"')),
    ("min_tokens", "9"),
    ("min_tokens", "-1"),
    ("logit_bias", '{"99999999": 5}'),
    ("logit_bias", '{"-1": 5}'),
    ("logit_bias", '{"abc": 1}'),
    ("logit_bias", '{"5": 1000}'),
    ("logit_bias", '{"5": null}'),
    ("logit_bias", '{"5": NaN}'),
    ("logit_bias", '{"\\u0665": 1}'),
    ("logit_bias", "[]"),
    ("stop", '""'),
    ("stop", '["a", ""]'),
    ("stop", "[1]"),
    ("stop", str(["a"] * 65).replace("'", '"')),
    ("stop_token_ids", "[99999999]"),
    ("stop_token_ids", "[-1]"),
    ("stop_token_ids", "[true]"),
    ("prompt_logprobs", "-1"),
    ("prompt_logprobs", "21"),
    ("cache_salt", '""'),
    ("cache_salt", "7"),
    ("stream", '"yes"'),
    ("stream_options", '{"include_usage": true}'),
    ("model", "7"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(("name", "value"), BAD)
async def test_bad_values_name_their_field(ask: Asker, path: str, name: str, value: str) -> None:
    prompt = (
        '"prompt": "x"' if path == COMPLETIONS else '"messages": [{"role":"user","content":"x"}]'
    )
    limit = "" if name == "max_tokens" else '"max_tokens": 8, '
    body = f'{{{prompt}, {limit}"{name}": {value}}}'
    answer = await ask.http.post(path, content=body.encode())
    error = refused(answer)
    assert error["param"] and error["param"].split("[")[0] == name
    assert error["type"] == "invalid_request_error"


LOGPROBS: list[tuple[str, dict[str, Any], str | None]] = [
    (COMPLETIONS, {"logprobs": 0}, None),
    (COMPLETIONS, {"logprobs": 5}, None),
    (COMPLETIONS, {"logprobs": -1}, "logprobs"),
    (COMPLETIONS, {"logprobs": 1000000}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (CHAT, {"logprobs": True}, None),
    (CHAT, {"logprobs": True, "top_logprobs": 20}, None),
    (CHAT, {"top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": False, "top_logprobs": 3}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    (CHAT, {"logprobs": -1}, "logprobs"),
    (CHAT, {"logprobs": 1.0}, "logprobs"),
]


@pytest.mark.parametrize(("path", "fields", "param"), LOGPROBS)
async def test_logprobs_limits(
    ask: Asker, path: str, fields: dict[str, Any], param: str | None
) -> None:
    answer = await (ask.completion if path == COMPLETIONS else ask.chat)(**fields)
    if param is None:
        assert answer.status_code == 200, answer.text
    else:
        error = refused(answer)
        assert error["param"] == param
        if type(fields.get("logprobs")) is int or "top_logprobs" in fields:
            assert "20" in error["message"] or "logprobs: true" in error["message"] or path == CHAT


HARMLESS = {
    "tools": [],
    "tool_choice": "none",
    "response_format": {"type": "text"},
    "suffix": None,
    "best_of": 1,
    "modalities": ["text"],
    "user": "u",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "use_beam_search": False,
    "priority": 0,
    "length_penalty": 1.0,
}


async def test_harmless_forms_of_them_are_taken(ask: Asker) -> None:
    assert (await ask.chat(**HARMLESS)).status_code == 200
    assert (await ask.completion(**HARMLESS)).status_code == 200


async def test_integral_floats_and_nulls_are_taken(ask: Asker) -> None:
    fields = {"max_tokens": 3.0, "n": 2.0, "seed": 7.0, "top_k": 5.0, "min_tokens": 0.0}
    fields |= {"temperature": None, "stop": None, "logit_bias": None, "stream": None, "user": None}
    answer = await ask.completion(**fields)
    assert answer.status_code == 200, answer.text
    assert len(answer.json()["choices"]) == 2
    request = ask.engine.requests[0]
    assert (request.params.max_tokens, request.seed, request.params.top_k) == (3, 7, 5)
    assert type(request.params.top_k) is int


async def test_every_field_reaches_the_engine(ask: Asker) -> None:
    fields = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "presence_penalty": 1,
        "frequency_penalty": -1,
        "repetition_penalty": 1.1,
        "logit_bias": {"5": -100},
        "stop": "zz",
        "stop_token_ids": [3],
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "min_tokens": 2,
        "max_tokens": 4,
        "skip_special_tokens": False,
    }
    assert (await ask.completion(**fields, cache_salt="s", seed=9)).status_code == 200
    request = ask.engine.requests[0]
    assert request.cache_salt == "s" and request.seed == 9
    got = {name: getattr(request.params, name) for name in fields}
    assert got == fields | {"logit_bias": {5: -100.0}, "stop": ("zz",), "stop_token_ids": (3,)}


async def test_sampling_defaults_stand_below_the_request(ask: Asker) -> None:
    ask.state.text = type(ask.state.text)(
        ask.state.text.tokenizer, ask.state.text.template, {"temperature": 0.3, "top_k": 9}
    )
    await ask.completion(top_k=2)
    params = ask.engine.requests[0].params
    assert (params.temperature, params.top_k) == (0.3, 2)


async def test_seeds_are_drawn_where_none_is_given(ask: Asker) -> None:
    for _ in range(2):
        await ask.completion()
    assert ask.engine.requests[0].seed != ask.engine.requests[1].seed


async def test_unknown_fields_warn_once(ask: Asker, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tokenspeed")
    for index in range(3):
        assert (await ask.completion(frobnicate=index)).status_code == 200
    lines = [each.getMessage() for each in list(caplog.records) if each.name == "tokenspeed"]
    assert sum("frobnicate" in line for line in lines) == 1
    for index in range(300):
        ask.state.field_warnings.warn(f"field{index}")
    assert len(ask.state.field_warnings._seen) == 256


async def test_strict_fields_refuse_unknown_ones() -> None:
    client = FakeClient()
    asker = Asker(client, make_state(client, strict_fields=True))
    assert refused(await asker.completion(frobnicate=1))["param"] == "frobnicate"
    await asker.check_alive()


PROMPT_IDS: list[Any] = [[0, 99999999], [-1], [1.5], [9223372036854775808], [10**400], [True]]


@pytest.mark.parametrize(
    "prompt", [*PROMPT_IDS, [[0], [99999999]], [["a"]], ["a", [1]], [[1], "a"]]
)
async def test_prompt_ids_outside_the_vocabulary(ask: Asker, prompt: list[Any]) -> None:
    error = refused(await ask.completion(prompt=prompt))
    assert error["param"] == "prompt"
    if prompt in ([0, 99999999], [-1]):
        assert str(VOCAB_SIZE) in error["message"]


EMPTY_PROMPTS: list[Any] = ["", [""], [[]], [], None, {}, 5, ["a", ""], [[1], []]]


@pytest.mark.parametrize("prompt", EMPTY_PROMPTS)
async def test_empty_and_senseless_prompts(ask: Asker, prompt: Any) -> None:
    assert refused(await ask.completion(prompt=prompt))["param"] == "prompt"


async def test_missing_prompt_and_messages(ask: Asker) -> None:
    assert refused(await ask.http.post(COMPLETIONS, json={}))["param"] == "prompt"
    assert refused(await ask.http.post(CHAT, json={}))["param"] == "messages"


async def test_counts_are_bounded(ask: Asker) -> None:
    assert refused(await ask.completion(prompt=["a"] * 2049))["param"] == "prompt"
    assert refused(await ask.completion(prompt=["a"] * 100, n=100))["param"] == "n"
    messages = [{"role": "user", "content": "x"}] * 4097
    assert refused(await ask.chat(messages=messages))["param"] == "messages"


async def test_context_limits_are_exact_on_both_apis(ask: Asker) -> None:
    full = TOKENIZER.encode("x" * 256, add_special_tokens=False)
    for prompt, limit, status in [
        (full, 1, 400),
        (full, None, 400),
        ([*full, 1], 1, 400),
        (full[:255], 1, 200),
        (full[:255], 2, 400),
        (full[:255], None, 200),
        (full[:10], 246, 200),
        (full[:10], 247, 400),
    ]:
        for stream in (False, True):
            answer = await ask.completion(prompt=prompt, max_tokens=limit, stream=stream)
            if status == 200:
                assert answer.status_code == 200
            else:
                error = refused(answer)
                assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
                assert "maximum context length is 256 tokens" in error["message"]
                assert str(len(prompt)) in error["message"]
    assert ask.engine.requests[2].params.max_tokens == 1
    error = refused(await ask.chat(messages=[{"role": "user", "content": "x" * 300}]))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert refused(await ask.chat(max_completion_tokens=250))["code"] == "context_length_exceeded"
    assert (await ask.chat(max_completion_tokens=2, max_tokens=5)).json()["usage"][
        "completion_tokens"
    ] == 2
