"""What a config.json may say, what it may not, and the context length that follows from it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from checkpoints import SIZES

from tokenspeed.models import MODELS, family_of
from tokenspeed.models.fields import Fields
from tokenspeed.models.rope import resolve_rope
from tokenspeed.text.errors import ModelError

LLAMA = {**SIZES, "architectures": ["LlamaForCausalLM"]}
LISTS = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}


def config_of(max_model_len: int | None = None, /, **fields: Any) -> Any:
    hf = {**LLAMA, **fields}
    return family_of(hf).config.from_dict(hf, max_model_len)


def scaled(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **fields}}


def test_defaults_are_those_of_the_checkpoint_format() -> None:
    config = config_of(num_key_value_heads=None, tie_word_embeddings=True)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (4, 4, 16)
    assert config.tied and config.norm_eps == 1e-6 and config.max_model_len == 128
    assert not config.attention_bias and not config.mlp_bias
    assert config.rope.inv_freq[1] == pytest.approx(10000 ** (-2 / 16))


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size must be a whole number from 1"),
        ({"hidden_size": "64"}, "hidden_size must be"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({"vocab_size": 1 << 40}, "vocab_size must be"),
        ({"intermediate_size": 1.5}, "intermediate_size must be"),
        ({"rms_norm_eps": math.nan}, "rms_norm_eps must be a number from 0 to 1, got nan"),
        ({"rms_norm_eps": math.inf}, "rms_norm_eps must be"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"num_key_value_heads": 3}, r"num_key_value_heads \(3\) must divide 4"),
        ({"num_key_value_heads": 8}, "num_key_value_heads must be"),
        ({"head_dim": 3}, "rotates 3 elements"),
        ({"max_position_embeddings": -5}, "max_position_embeddings must be"),
        ({"rope_theta": 0}, "rope_theta must be"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be"),
    ],
    ids=str,
)
def test_bad_fields_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json.*{match}"):
        config_of(**fields)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_sliding_windows_are_refused(architecture: str) -> None:
    fields = {"architectures": [architecture], "use_sliding_window": True}
    with pytest.raises(ModelError, match="use_sliding_window True is not supported"):
        config_of(**fields)
    assert config_of(**{**fields, "use_sliding_window": False}).max_model_len == 128


@pytest.mark.parametrize("names", [["GPT2LMHeadModel"], [], None, "x", [3], {"a": 1}])
def test_unknown_architectures_name_the_known(names: Any) -> None:
    with pytest.raises(ModelError, match=", ".join(MODELS)):
        family_of({"architectures": names})


@pytest.mark.parametrize("kind", ["yarm", "su", 7, ["yarn"], ""])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_rope_types_are_named(kind: Any, key: str) -> None:
    with pytest.raises(ModelError, match=r"which is not supported \(known: default, linear"):
        config_of(rope_scaling={key: kind, "factor": 2.0})


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"rope_scaling": {"factor": 2.0}}, "has a factor but no rope_type"),
        ({"rope_scaling": [2.0]}, "must be one flat object"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn"}}}, "must be one flat object"),
        (scaled("linear"), "factor is missing"),
        (scaled("linear", factor=0.5), "factor must be a number from 1"),
        (scaled("dynamic", factor=math.nan), "factor must be"),
        (scaled("llama3", factor=8.0, high_freq_factor=4.0), "low_freq_factor is missing"),
        (scaled("llama3", factor=8, low_freq_factor=4, high_freq_factor=4), "must be above"),
        (scaled("yarn", factor="4"), "factor must be"),
        (scaled("yarn", factor=4.0, beta_fast=0), "beta_fast must be"),
        (scaled("yarn", factor=4.0, truncate=1), "truncate must be true or false"),
        (scaled("yarn", factor=4.0, original_max_position_embeddings=0), "original_max"),
        (scaled("longrope", long_factor=[1.0] * 8), "short_factor is missing"),
        (scaled("longrope", short_factor=[1.0] * 7, long_factor=[1.0] * 8), "a list of 8 numbers"),
        (scaled("longrope", short_factor=[0] * 8, long_factor=[1] * 8), "short_factor must be"),
    ],
    ids=str,
)
def test_bad_rope_fields_are_named(fields: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        config_of(**fields)


@pytest.mark.parametrize("absent", [None, {}, {"rope_type": "default"}, {"rope_type": None}])
def test_no_scaling_is_the_default_rope(absent: Any) -> None:
    plain = config_of(rope_theta=500.0).rope
    assert config_of(rope_theta=500.0, rope_scaling=absent).rope == plain
    assert config_of(rope_theta=500.0, rope_parameters=absent).rope == plain
    assert config_of(rope_parameters={**(absent or {}), "rope_theta": 500.0}).rope == plain


def test_rope_scaling_counts_where_both_objects_are_given() -> None:
    both = {**scaled("linear", factor=2.0), "rope_parameters": {"rope_type": "default"}}
    assert config_of(**both).rope == config_of(**scaled("linear", factor=2.0)).rope


@pytest.mark.parametrize(
    ("fields", "limit", "default"),
    [
        ({}, 128, 128),
        (scaled("linear", factor=2.5), 320, 320),
        (scaled("dynamic", factor=4.0), 512, 128),
        (scaled("llama3", factor=8, low_freq_factor=1, high_freq_factor=4), 128, 128),
        (scaled("yarn", factor=4.0), 512, 512),
        (scaled("yarn", factor=4.0, original_max_position_embeddings=64), 256, 256),
        (scaled("yarn", original_max_position_embeddings=32), 128, 128),
        (scaled("longrope", original_max_position_embeddings=32, **LISTS), 128, 128),
    ],
    ids=str,
)
def test_context_length(fields: dict[str, Any], limit: int, default: int) -> None:
    assert config_of(**fields).max_model_len == default
    assert config_of(limit, **fields).max_model_len == limit
    assert config_of(7, **fields).max_model_len == 7
    with pytest.raises(ModelError, match=f"limit of {limit} tokens") as error:
        config_of(limit + 1, **fields)
    assert "\n" not in str(error.value) and f"ask for {limit} or less" in str(error.value)


def test_dynamic_leaves_short_contexts_alone() -> None:
    plain = config_of().rope
    for max_model_len in (None, 1, 128):
        assert config_of(max_model_len, **scaled("dynamic", factor=4.0)).rope == plain
    stretched = config_of(256, **scaled("dynamic", factor=4.0)).rope
    assert stretched.inv_freq[0] == 1.0 and stretched.inv_freq[-1] < plain.inv_freq[-1]


@pytest.mark.parametrize("where", ["beside", "inside"])
def test_partial_rotary_factor(where: str) -> None:
    """Half of a head of 16 is rotated, by the frequencies of a head of 8."""
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5}
    fields = {"partial_rotary_factor": 0.5} if where == "beside" else {"rope_parameters": rope}
    expected, _ = resolve_rope(Fields(SIZES), 8, None)
    assert config_of(**fields).rope == expected and len(expected.inv_freq) == 4
