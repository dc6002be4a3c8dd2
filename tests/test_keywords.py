"""Keywords of `LLM`: what they set, what those of other engines get, what is refused and how."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tokenspeed.config import OPTIONS, make_config
from tokenspeed.keywords import config_of
from tokenspeed.options import ConfigError
from tokenspeed.peers.answers import Refused, Same, Takes
from tokenspeed.peers.table import TABLE

ROWS = [
    pytest.param(row, name.removeprefix("--").replace("-", "_"), id=name)
    for heading, rows in TABLE.items()
    for row in rows
    for name in row.names
    if heading != "Server" and name.startswith("--")
]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"seed": 3, "disable_pass": ["rope"]}, {"seed": 3, "disable_pass": ("rope",)}),
        ({"enforce_eager": True}, {"level": 0}),
        ({"enforce_eager": False}, {}),
        ({"disable_radix_cache": True}, {"enable_prefix_caching": False}),
        ({"max_running_requests": 7}, {"max_num_seqs": 7}),
        ({"max_num_batched_tokens": 512}, {"chunked_prefill_size": 512}),
        ({"tensor_parallel_size": 1, "trust_remote_code": True, "swap_space": 4}, {}),
        ({"generation_config": "vllm"}, {"generation_config": "none"}),
        ({"async_scheduling": False}, {"disable_overlap_schedule": True}),
        ({"async_scheduling": True}, {"disable_overlap_schedule": False}),
        ({"dtype": torch.bfloat16}, {"dtype": "bfloat16"}),
        (
            {"dtype": torch.float16, "kv_cache_dtype": torch.float32},
            {"dtype": "float16", "kv_cache_dtype": "float32"},
        ),
        ({"max_seq_len": 8, "max_seqlen": 8, "max_model_len": 8}, {"max_model_len": 8}),
        ({"enforce_eager": True, "level": 0}, {"level": 0}),
        (
            {"disable_radix_cache": True, "enable_prefix_caching": None},
            {"enable_prefix_caching": False},
        ),
    ],
    ids=str,
)
def test_what_keywords_set(given: dict[str, Any], meant: dict[str, Any]) -> None:
    assert config_of("m", given) == make_config({"model": "m", **meant})


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size=2 is not supported: one"),
        ({"quantization": "awq"}, ConfigError, "quantization='awq' is not supported: no quantised"),
        ({"enable_lora": True}, ConfigError, "enable_lora=True is not supported: no adapters"),
        ({"speculative_config": {"method": "ngram"}}, ConfigError, "no speculative decoding yet"),
        ({"disable_radix_cache": 0}, ConfigError, "disable_radix_cache must be true or false"),
        (
            {"enforce_eager": "false"},
            ConfigError,
            "enforce_eager must be true or false, not 'false",
        ),
        ({"max_num_seqs": "many"}, ConfigError, "max_num_seqs must be a whole number"),
        ({"dtype": torch.float64}, ConfigError, "dtype must be one of: auto, half"),
        ({"port": 1}, TypeError, "'port': it is the server's"),
        ({"disable_log_stats": True}, TypeError, "'disable_log_stats': it is the server's"),
        ({"max_modl_len": 1}, TypeError, "'max_modl_len'; did you mean max_model_len?"),
    ],
    ids=str,
)
def test_what_is_refused_says_why(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        config_of("m", given)


@pytest.mark.parametrize("name", [*OPTIONS, *(row.values[1] for row in ROWS), "disable_log_stats"])
def test_none_is_not_given(name: str) -> None:
    assert config_of("m", {name: None}) == make_config({"model": "m"})


def test_a_model_may_be_named_as_others_name_it() -> None:
    assert config_of(None, {"model_path": "n"}) == make_config({"model": "n"})
    assert config_of(None, {}) == make_config({})


def test_none_makes_no_unknown_name_known() -> None:
    with pytest.raises(TypeError, match="did you mean max_model_len"):
        config_of("m", {"max_modl_len": None})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"max_num_seqs": 7, "max_running_requests": 8},
            "max_running_requests=8 contradicts max_num_seqs=7: give max_num_seqs alone",
        ),
        (
            {"page_size": 16, "prefix_granularity": 32},
            "prefix_granularity=32 contradicts page_size=16: give block_size alone",
        ),
        (
            {"enforce_eager": True, "level": 1},
            "level=1 contradicts enforce_eager=True: give level alone",
        ),
        (
            {"disable_radix_cache": True, "enable_prefix_caching": True},
            "enable_prefix_caching=True contradicts disable_radix_cache=True: "
            "give enable_prefix_caching alone",
        ),
        ({"model_path": "n"}, "model_path='n' contradicts model='m': give model alone"),
    ],
    ids=str,
)
def test_contradictions_are_refused_in_any_order(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(says)}$"):
        config_of("m", given)
    with pytest.raises(ConfigError, match=f"contradicts .* give {says.split()[-2]} alone$"):
        config_of("m", dict(reversed(given.items())))


def test_what_is_granted_otherwise_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tokenspeed")
    config_of("m", {"swap_space": 4})
    assert caplog.messages == ["swap_space=4: no swap: a preempted request is recomputed"]


@pytest.mark.parametrize(("row", "name"), ROWS)
def test_every_row_has_an_answer_for_a_keyword(row: Any, name: str) -> None:
    """The one that its flag gets."""
    value: Any = True if row.takes is Takes.NOTHING else "x"
    if isinstance(row.answer, Refused):
        with pytest.raises(ConfigError, match=re.escape(f"{name}={value!r} is not supported")):
            config_of("m", {name: value})
    elif isinstance(row.answer, Same) and row.takes is not Takes.NOTHING:
        # Whatever our option says of such a value, it says it under its own name.
        try:
            config_of("m", {name: value})
        except ConfigError as error:
            assert str(error).partition(" ")[0] in OPTIONS
    else:
        config_of("m", {name: value})
