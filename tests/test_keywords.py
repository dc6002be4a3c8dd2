"""Keywords of `LLM`: what they set, what those of other engines get, what is refused and how."""

from __future__ import annotations

import re
from typing import Any

import pytest

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
        ({"quantization": None, "hf_overrides": None}, {}),
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
        ({"port": 1}, TypeError, "'port': it is the server's"),
        ({"disable_log_stats": True}, TypeError, "'disable_log_stats': it is the server's"),
        ({"max_modl_len": 1}, TypeError, "'max_modl_len'; did you mean max_model_len?"),
    ],
    ids=str,
)
def test_what_is_refused_says_why(given: dict[str, Any], kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=re.escape(says)):
        config_of("m", given)


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
