"""A GGUF's metadata as the config.json and generation_config.json of the same model.

Only what a config says: tensors stay as they are in the file (in particular the interleaved q and
k rows of `llama` files are the loader's work).
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import Gguf


@dataclass(frozen=True)
class _Architecture:
    model_type: str
    class_name: str
    extra: dict[str, Any]


# general.architecture -> what config.json calls it.
ARCHITECTURES: dict[str, _Architecture] = {
    "llama": _Architecture("llama", "LlamaForCausalLM", {}),
    "qwen2": _Architecture("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    "qwen3": _Architecture("qwen3", "Qwen3ForCausalLM", {"use_sliding_window": False}),
}

# general.file_type of unquantised files; quantised weights come out as bfloat16.
_DTYPES = {0: "float32", 1: "float16"}
_UNSAID = 1024
"""llama.cpp's own mark for a file type that was guessed."""

_YARN_KEYS = {
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.attn_factor": "attention_factor",
}


def gguf_config(gguf: Gguf) -> dict[str, Any]:
    """The HF-style config of a dense llama, qwen2 or qwen3 file."""
    name = gguf.text("general.architecture")
    architecture = ARCHITECTURES.get(name)
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(
            f"{gguf.path}: the model family {name!r:.99} is not supported in GGUF files "
            f"(supported: {known}); give a file of one of these families"
        )
    if gguf.integer("split.count", 1) > 1:
        raise ModelError(
            f"{gguf.path}: one part of a split GGUF; join the parts with llama-gguf-split --merge"
        )
    if gguf.integer(f"{name}.expert_count", 0) > 0:
        raise ModelError(f"{gguf.path}: {name} GGUF files with experts cannot be read; only dense")
    hidden = gguf.integer(f"{name}.embedding_length")
    heads = gguf.integer(f"{name}.attention.head_count")
    if not 0 < heads <= hidden:
        raise ModelError(f"{gguf.path}: {heads} attention heads for a hidden size of {hidden}")
    head_dim = gguf.integer(f"{name}.attention.key_length", hidden // heads, low=1)
    if gguf.integer(f"{name}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{gguf.path}: keys and values of different length cannot be served")
    return {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": gguf.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": gguf.integer(f"{name}.block_count", high=1 << 16),
        "num_attention_heads": heads,
        "num_key_value_heads": gguf.integer(f"{name}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": gguf.number(f"{name}.attention.layer_norm_rms_epsilon"),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
        "vocab_size": _vocab_size(gguf, name),
        "max_position_embeddings": gguf.integer(f"{name}.context_length"),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "torch_dtype": _DTYPES.get(gguf.integer("general.file_type", _UNSAID), "bfloat16"),
        **_rope(gguf, name, head_dim),
        **_token_ids(gguf),
        **architecture.extra,
    }


def gguf_generation_config(gguf: Gguf) -> dict[str, Any]:
    """All end-of-sequence ids of the file: end of text, of turn and of message."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
    ids = [gguf.integer(key) for key in keys if key in gguf.metadata]
    return {"eos_token_id": sorted(set(ids))} if ids else {}


def _vocab_size(gguf: Gguf, name: str) -> int:
    """Rows of the embedding; a file without tensors (a vocabulary alone) says it or lists it."""
    if embedding := gguf.tensors.get("token_embd.weight"):
        return embedding.shape[0] if embedding.shape else 0
    tokens = gguf.array("tokenizer.ggml.tokens", str)
    return gguf.integer(f"{name}.vocab_size", len(tokens))


def _token_ids(gguf: Gguf) -> dict[str, int]:
    keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {name: f"tokenizer.ggml.{key}_token_id" for name, key in keys.items()}
    return {name: gguf.integer(key) for name, key in found.items() if key in gguf.metadata}


def _rope(gguf: Gguf, name: str, head_dim: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "rope_theta": gguf.positive(f"{name}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(gguf, name),
    }
    rotated = gguf.integer(f"{name}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if factors := _frequency_factors(gguf):
        config["rope_scaling"] = _llama3_scaling(gguf, factors, config["rope_theta"])
    return config


def _rope_scaling(gguf: Gguf, name: str) -> dict[str, Any] | None:
    """`rope.scaling.*`; old files have `rope.scale_linear` alone."""
    old = gguf.number(f"{name}.rope.scale_linear", 1.0)
    kind = gguf.text(f"{name}.rope.scaling.type", "linear" if old != 1.0 else "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ModelError(f"{gguf.path}: rope scaling {kind!r} is not known (known: linear, yarn)")
    factor = gguf.number(f"{name}.rope.scaling.factor", old)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        original = gguf.integer(f"{name}.rope.scaling.original_context_length")
        scaling["original_max_position_embeddings"] = original
        for key, option in _YARN_KEYS.items():
            if f"{name}.{key}" in gguf.metadata:
                scaling[option] = gguf.number(f"{name}.{key}")
    return scaling


def _frequency_factors(gguf: Gguf) -> list[float]:
    """`rope_freqs.weight`: what each rotary frequency is divided by; empty if there is none."""
    tensor = gguf.tensors.get("rope_freqs.weight")
    if tensor is None:
        return []
    if tensor.type != "F32" or len(tensor.shape) != 1 or not 0 < tensor.shape[0] <= 4096:
        raise ModelError(f"{gguf.path}: rope_freqs.weight is {tensor.type} {tensor.shape}")
    with gguf.path.open("rb") as file:
        file.seek(tensor.start)
        raw = file.read(tensor.num_bytes)
    if len(raw) != tensor.num_bytes:
        raise ModelError(f"{gguf.path}: the file is cut inside rope_freqs.weight")
    factors = list(struct.unpack(f"<{tensor.shape[0]}f", raw))
    if not all(0 < factor < math.inf for factor in factors):
        raise ModelError(f"{gguf.path}: rope_freqs.weight has numbers that are not above 0")
    return factors


def _llama3_scaling(gguf: Gguf, factors: list[float], theta: float) -> dict[str, Any]:
    """The llama3 rule that gave these factors. Converters store the factors and drop the rule; its
    other constants are the same in all Llama 3.1 to 3.3 models, and the factors prove it.
    """
    rule = {
        "rope_type": "llama3",
        "factor": float(f"{max(factors):.6g}"),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = [_llama3_factor(rule, theta, i / len(factors)) for i in range(len(factors))]
    if any(not math.isclose(a, b, rel_tol=1e-3) for a, b in zip(factors, expected, strict=True)):
        raise ModelError(
            f"{gguf.path}: rope_freqs.weight does not follow the llama3 rule, and no other is known"
        )
    return rule


def _llama3_factor(rule: dict[str, Any], theta: float, exponent: float) -> float:
    """What the llama3 rule divides the frequency theta**-exponent by."""
    wavelength = 2 * math.pi * theta**exponent
    turns = rule["original_max_position_embeddings"] / wavelength
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    if turns >= high:
        return 1.0
    if turns <= low:
        return float(rule["factor"])
    smooth = (turns - low) / (high - low)
    return float(1.0 / ((1 - smooth) / rule["factor"] + smooth))
