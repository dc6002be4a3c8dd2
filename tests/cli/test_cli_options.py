"""Options: derived from the fields, bounded on both sides, and read from words."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.cli.values import from_words, from_yaml
from tokenspeed.config import GROUPS, OPTIONS, Config, ModelConfig, make_config
from tokenspeed.options import ConfigError, Option, options_of
from tokenspeed.server_config import ServerConfig

NUMBERS = [option for option in OPTIONS.values() if option.kind in (int, float)]


def test_groups_are_the_fields_of_config() -> None:
    assert {name: type(value) for name, value in vars(Config()).items()} == GROUPS


def test_no_name_or_flag_is_used_twice() -> None:
    every = [option for settings in GROUPS.values() for option in options_of(settings)]
    flags = [flag for option in every for flag in (option.flag, *option.aliases)]
    assert len(every) == len(OPTIONS)
    assert len(flags) == len(set(flags))


@pytest.mark.parametrize("option", NUMBERS, ids=lambda option: option.name)
def test_every_number_is_bounded_on_both_sides(option: Option) -> None:
    if option.choices:
        return
    assert option.low is not None and option.high is not None
    for bad in (option.low - 1, option.high + 1, math.nan, math.inf, -math.inf, True, "1"):
        with pytest.raises(ConfigError):
            option.check((bad,) if option.is_list else bad)
    for good in (option.kind(option.low), option.kind(option.high)):
        option.check((good,) if option.is_list else good)


@pytest.mark.parametrize("option", OPTIONS.values(), ids=lambda option: option.name)
def test_defaults_are_allowed_and_have_help(option: Option) -> None:
    option.check(option.default)
    assert option.help


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"max_model_lem": 1}, "did you mean max_model_len?"),
        ({"max_model_len": 0}, "max_model_len must be from 2 to"),
        ({"dtype": "int8"}, "dtype must be one of: auto"),
        ({"enable_prefix_caching": 1}, "must be true or false, got 1"),
        ({"model": ""}, "model must be 1 to 4096 printable characters"),
        ({"model": "a\0b"}, "printable"),
        ({"served_model_name": "a"}, "must be a tuple"),
        ({"served_model_name": ("a",) * 65}, "at most 64"),
        ({"port": 8000.0}, "must be a whole number"),
    ],
)
def test_bad_values_are_named(values: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says.replace("?", r"\?")):
        make_config(values)


def test_secrets_are_not_in_errors() -> None:
    with pytest.raises(ConfigError) as caught:
        ServerConfig(api_key="hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_settings_cannot_be_held_outside_their_limits() -> None:
    with pytest.raises(ConfigError, match="seed must be from 0"):
        ModelConfig(seed=-1)


@pytest.mark.parametrize(
    ("name", "words", "value"),
    [
        ("max_model_len", ["4k"], 4000),
        ("max_model_len", ["4K"], 4096),
        ("max_model_len", ["1.5k"], 1500),
        ("max_model_len", ["auto"], None),
        ("max_total_tokens", ["1M"], 1 << 20),
        ("max_total_tokens", ["2m"], 2_000_000),
        ("gpu_memory_utilization", ["0.5"], 0.5),
        ("gpu_memory_utilization", ["1"], 1.0),
        ("served_model_name", ["a", "b"], ("a", "b")),
        ("disable_overlap_schedule", ["auto"], None),
        ("disable_overlap_schedule", ["yes"], True),
        ("seed", ["9223372036854775807"], (1 << 63) - 1),
    ],
)
def test_words_become_values(name: str, words: list[str], value: Any) -> None:
    assert from_words(OPTIONS[name], words) == value


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("max_model_len", ["4.0001k"]),
        ("max_model_len", ["k"]),
        ("max_model_len", ["nan"]),
        ("max_model_len", ["infk"]),
        ("max_model_len", ["1e400k"]),
        ("max_model_len", ["9" * 5000]),
        ("max_model_len", ["1", "2"]),
        ("port", ["8k"]),
        ("gpu_memory_utilization", ["nan"]),
        ("enable_prefix_caching", ["maybe"]),
        ("dtype", ["none"]),
    ],
)
def test_words_that_mean_nothing(name: str, words: list[str]) -> None:
    with pytest.raises(ConfigError):
        from_words(OPTIONS[name], words)


@given(name=st.sampled_from(sorted(OPTIONS)), words=st.lists(st.text(max_size=40), max_size=3))
def test_any_words_give_an_allowed_value_or_one_line(name: str, words: list[str]) -> None:
    option = OPTIONS[name]
    try:
        option.check(from_words(option, words))
    except ConfigError as error:
        assert str(error).isprintable()


@pytest.mark.parametrize(
    ("name", "given_value", "value"),
    [
        ("max_model_len", "4k", 4000),
        ("max_model_len", 4096, 4096),
        ("max_model_len", None, None),
        ("enable_prefix_caching", False, False),
        ("served_model_name", ["a", 1], ("a", "1")),
        ("served_model_name", "a", ("a",)),
        ("revision", 7, "7"),
        ("gpu_memory_utilization", 1, 1),
    ],
)
def test_yaml_values(name: str, given_value: Any, value: Any) -> None:
    assert from_yaml(OPTIONS[name], given_value) == value


@pytest.mark.parametrize(
    ("name", "given_value"),
    [
        ("max_model_len", True),
        ("max_model_len", {"a": 1}),
        ("max_model_len", math.nan),
        ("model", {"a": 1}),
        ("model", None),
        ("enable_prefix_caching", 0),
        ("served_model_name", [["a"]]),
    ],
)
def test_yaml_values_of_the_wrong_kind(name: str, given_value: Any) -> None:
    with pytest.raises(ConfigError):
        from_yaml(OPTIONS[name], given_value)
