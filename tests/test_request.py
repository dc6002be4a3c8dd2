"""SamplingParams refuses what it cannot mean, from Python as from the wire."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tokenspeed.request import (
    InvalidRequest,
    SamplingParams,
    params_of_prompt,
    params_of_samples,
)

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (NAN, INF, -0.1, 2.1, None, "1", True)),
        *(("top_p", value) for value in (NAN, 0, -1, 1.1, None)),
        *(("min_p", value) for value in (NAN, -0.1, 1.1)),
        *(("top_k", value) for value in (-2, 1.5, None, 10**9)),
        *(("repetition_penalty", value) for value in (NAN, 0, -1, 1e-300, 0.0099, 1e6, None)),
        *(("presence_penalty", value) for value in (NAN, -2.1, 2.1)),
        *(("frequency_penalty", value) for value in (NAN, -2.1, 2.1)),
        *(("n", value) for value in (0, -1, 10**9, "2", 1.5, True)),
        *(("max_tokens", value) for value in (-1, 10**18, 2.5)),
        *(("min_tokens", value) for value in (-1, 2.5, None)),
        *(("seed", value) for value in (-1, 2**64, 1.5)),
        *(("logprobs", value) for value in (-1, 21, 1.5)),
        *(("prompt_logprobs", value) for value in (-1, 21, 2.5)),
        *(("logit_bias", value) for value in ({"5": 1}, {5: NAN}, {5: 101}, {5: None}, [5])),
        *(("stop", value) for value in (5, [""], ["x" * 2000], ["x"] * 100, [5])),
        *(("stop_token_ids", value) for value in (5, [1.5], ["1"])),
        *(("ignore_eos", value) for value in ("no", 1, None)),
    ],
)
def test_a_bad_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(InvalidRequest, match=name) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert len(str(caught.value)) < 200


def test_one_stop_string_is_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["stop", "stop_token_ids", "bad_words", "logit_bias"])
def test_none_is_none_of_them(name: str) -> None:
    params = SamplingParams(**{name: None})  # type: ignore[arg-type]
    assert params == SamplingParams()
    assert getattr(params, name) is not None


def test_min_tokens_above_max_tokens() -> None:
    with pytest.raises(InvalidRequest, match="min_tokens"):
        SamplingParams(max_tokens=3, min_tokens=4)
    with pytest.raises(InvalidRequest, match="min_tokens"):
        params_of_prompt(SamplingParams(min_tokens=4), 3)


def test_parameters_of_prompts_and_samples_are_as_if_made_anew() -> None:
    common = {"logit_bias": {3: 1.0}, "stop": ("a",), "bad_token_ids": ((1, 2),), "min_tokens": 1}
    given = SamplingParams(n=3, prompt_logprobs=2, **common)  # type: ignore[arg-type]
    first, *others = params_of_samples(params_of_prompt(given, 5), 3)
    made = SamplingParams(max_tokens=5, prompt_logprobs=2, **common)  # type: ignore[arg-type]
    assert first == made
    assert others == [msgspec.structs.replace(made, prompt_logprobs=None)] * 2
    assert (given.n, given.max_tokens, given.prompt_logprobs) == (3, None, 2)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("max_token", "max_tokens"),
        ("stop_tokens_ids", "stop_token_ids"),
    ],
)
def test_misspelt_parameters_are_told_the_right_name(name: str, meant: str) -> None:
    with pytest.raises(
        TypeError, match=rf"SamplingParams\(\) takes no '{name}'; did you mean {meant}\?"
    ):
        SamplingParams(**{name: 1})
    with pytest.raises(TypeError, match=r"takes no 'xyzzy'$"):
        SamplingParams(temperature=0.0, xyzzy=1)  # type: ignore[call-arg]
