"""A GGUF's metadata as config.json: the known values, the rope rules, and refusals by name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from gguf_writer import gguf_bytes, llama_metadata
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import read_gguf
from tokenspeed.text.gguf_config import gguf_config, gguf_generation_config
from tokenspeed.text.source import ModelSource, eos_token_ids, resolve_model

Tensors = dict[str, tuple[tuple[int, ...], list[float]]]
EMBEDDING: Tensors = {"token_embd.weight": ((4, 64), [0.0] * 256)}


def config_of(folder: Path, metadata: dict[str, Any], tensors: Tensors = EMBEDDING) -> Any:
    path = folder / "model.gguf"
    path.write_bytes(gguf_bytes(metadata, tensors))
    return gguf_config(read_gguf(path))


def test_bundled_model(smollm2_source: ModelSource) -> None:
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "attention_bias": False,
        "mlp_bias": False,
    }
    assert smollm2_source.config == expected
    assert eos_token_ids(smollm2_source) == {2}


@pytest.mark.parametrize(
    ("name", "class_name"), [("qwen2", "Qwen2ForCausalLM"), ("qwen3", "Qwen3ForCausalLM")]
)
def test_qwen(tmp_path: Path, name: str, class_name: str) -> None:
    metadata = {key.replace("llama.", f"{name}."): v for key, v in llama_metadata().items()}
    metadata |= {"general.architecture": name, f"{name}.attention.key_length": 32}
    metadata[f"{name}.attention.value_length"] = 32
    tensors = EMBEDDING | {"output.weight": ((4, 64), [0.0] * 256)}
    config = config_of(tmp_path, metadata, tensors | {"blk.0.attn_q.bias": ((1,), [0.0])})
    assert config["architectures"] == [class_name]
    assert config["model_type"] == name
    assert config["head_dim"] == 32
    assert config["tie_word_embeddings"] is False
    assert config["attention_bias"] is True
    assert config["use_sliding_window"] is False


def test_defaults_and_vocabulary_size(tmp_path: Path) -> None:
    metadata = llama_metadata()
    del metadata["llama.attention.head_count_kv"]
    config = config_of(tmp_path, metadata)
    assert (config["num_key_value_heads"], config["head_dim"]) == (4, 16)
    assert config["rope_theta"] == 10000.0
    assert config_of(tmp_path, metadata, {})["vocab_size"] == 4
    padded: Tensors = {"token_embd.weight": ((6, 64), [0.0] * 384)}
    assert config_of(tmp_path, metadata, padded)["vocab_size"] == 6


@pytest.mark.parametrize(
    ("file_type", "dtype"), [(0, "float32"), (1, "float16"), (3, "bfloat16"), (32, "bfloat16")]
)
def test_dtype(tmp_path: Path, file_type: int, dtype: str) -> None:
    metadata = llama_metadata(general__file_type=file_type)
    assert config_of(tmp_path, metadata)["torch_dtype"] == dtype


def test_rope_scaling(tmp_path: Path) -> None:
    yarn = llama_metadata(
        llama__rope__scaling__type="yarn",
        llama__rope__scaling__factor=4.0,
        llama__rope__scaling__original_context_length=128,
        llama__rope__scaling__yarn_beta_fast=16.0,
        llama__rope__dimension_count=8,
    )
    config = config_of(tmp_path, yarn)
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 16.0,
    }
    assert config["partial_rotary_factor"] == 0.5
    old = config_of(tmp_path, llama_metadata(llama__rope__scale_linear=2.0))
    assert old["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    plain = config_of(tmp_path, llama_metadata(llama__rope__scaling__type="none"))
    assert plain["rope_scaling"] is None


def test_llama3_rule_is_recovered_from_its_factors(tmp_path: Path) -> None:
    rule = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    peer = LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        rope_parameters={**rule, "rope_theta": 500000.0},
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](peer, "cpu")
    factors = [500000.0 ** (-i / 32) / float(f) for i, f in enumerate(scaled)]
    assert math.isclose(max(factors), 32.0, rel_tol=1e-4)
    metadata = llama_metadata(llama__rope__freq_base=500000.0)
    tensors = EMBEDDING | {"rope_freqs.weight": ((32,), factors)}
    assert config_of(tmp_path, metadata, tensors)["rope_scaling"] == {
        **rule,
        "factor": pytest.approx(32.0, rel=1e-4),
    }
    factors[20] *= 1.1
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(tmp_path, metadata, EMBEDDING | {"rope_freqs.weight": ((32,), factors)})


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general__architecture": "mamba"}, "family 'mamba' is not supported"),
        ({"split__count": 3}, "llama-gguf-split"),
        ({"llama__expert_count": 8}, "experts"),
        ({"llama__attention__head_count": 0}, "0 attention heads"),
        ({"llama__attention__head_count": [4, 4]}, "head_count must be an integer"),
        ({"llama__attention__value_length": 99}, "different length"),
        ({"llama__rope__scaling__type": "su"}, "'su' is not known"),
        ({"llama__attention__layer_norm_rms_epsilon": "x"}, "finite number"),
        ({"llama__block_count": 1 << 20}, "block_count"),
        ({"llama__rope__freq_base": 0.0}, "freq_base must be a number above 0"),
        ({"llama__rope__freq_base": -2.0}, "freq_base must be a number above 0"),
        (
            {"llama__attention__key_length": 0, "llama__rope__dimension_count": 8},
            "key_length must be an integer from 1",
        ),
    ],
)
def test_refusals_name_the_cause(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(tmp_path, llama_metadata(**extra))


@pytest.mark.parametrize("factor", [0.0, -1.0, math.inf, math.nan])
def test_frequency_factors_are_above_zero(tmp_path: Path, factor: float) -> None:
    for factors in ([factor] * 32, [1.0] * 31 + [factor]):
        with pytest.raises(ModelError, match="numbers that are not above 0"):
            config_of(
                tmp_path, llama_metadata(), EMBEDDING | {"rope_freqs.weight": ((32,), factors)}
            )


def test_all_end_ids(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(
        gguf_bytes(llama_metadata(tokenizer__ggml__eot_token_id=1, tokenizer__ggml__eom_token_id=2))
    )
    assert gguf_generation_config(read_gguf(path)) == {"eos_token_id": [1, 2, 3]}
    assert eos_token_ids(resolve_model(str(path))) == {1, 2, 3}
