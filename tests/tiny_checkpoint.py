"""A Llama small enough to run in a millisecond, with weights large enough to have opinions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 199,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 7,
    "torch_dtype": "float32",
}


def write_tiny_checkpoint(folder: Path) -> Path:
    """Fill `folder` with config.json and model.safetensors. No tokenizer."""
    hidden, inner, vocab = 32, 48, 199
    shapes = {"model.embed_tokens": (vocab, hidden), "lm_head": (vocab, hidden)}
    for layer in range(3):
        block = f"model.layers.{layer}"
        shapes |= {f"{block}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{block}.self_attn.{name}_proj": (hidden // 2, hidden) for name in "kv"}
        shapes |= {f"{block}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"{block}.mlp.down_proj": (hidden, inner)}
    norms = [name for i in range(3) for name in _norms(f"model.layers.{i}")]
    random = np.random.default_rng(5)
    tensors = {
        f"{name}.weight": random.normal(0.0, 0.35, shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    for name in (*norms, "model.norm"):
        tensors[f"{name}.weight"] = random.normal(1.0, 0.1, hidden).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _norms(block: str) -> tuple[str, str]:
    return f"{block}.input_layernorm", f"{block}.post_attention_layernorm"
