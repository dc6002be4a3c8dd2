"""Tiny random checkpoints on disk as transformers writes them, and both sides' models of them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from dense_state import Sequence
from torch import Tensor, nn

from tokenspeed.loader import empty_model, load_weights
from tokenspeed.models import family_of
from tokenspeed.text.source import resolve_model

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

FAMILIES: dict[str, tuple[type[Any], type[Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-mha-wide-heads": ("llama", {"num_key_value_heads": 4, "head_dim": 24}),
    "qwen2": ("qwen2", {}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-tied-bias": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True}),
}
"""Name -> family, and what its config.json says beside the sizes."""


def write_checkpoint(folder: Path, family: str, **fields: Any) -> Path:
    """A folder with random weights. `fields` stand in config.json word for word."""
    make_config, make_model = FAMILIES[family]
    ropes = {k: v for k, v in fields.items() if k.startswith(("rope_", "original_", "partial_"))}
    plain = {k: v for k, v in fields.items() if k not in ropes}
    torch.manual_seed(len(str(folder.name)) + len(fields))
    model = make_model(make_config(**{**SIZES, **plain})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:  # norms and biases: not their trivial initial values
                parameter.normal_(1.0 if name.endswith("norm.weight") else 0.0, 0.2)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    if ropes:
        config.pop("rope_parameters", None)
    (folder / "config.json").write_text(json.dumps({**config, **ropes}))
    return folder


def load_reference(
    folder: Path, family: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Callable[[list[int]], Tensor]:
    """transformers' logits [T, V] of one whole sequence."""
    model = (
        FAMILIES[family][1]
        .from_pretrained(folder, dtype=dtype, attn_implementation="eager")
        .eval()
        .to(device)
    )

    @torch.no_grad()
    def logits(ids: list[int]) -> Tensor:
        return model(torch.tensor([ids], device=device)).logits[0]

    return logits


def load_ours(
    folder: Path | str, max_model_len: int | None = None, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Callable[[], Sequence]]:
    """The model filled through the loader, and a maker of fresh sequences."""
    source = resolve_model(str(folder))
    family = family_of(source.config)
    config = family.config.from_dict(source.config, max_model_len)
    model = empty_model(lambda: family.model(config), dtype, "cpu")
    load_weights(model, family.weights, source, load_format="auto", seed=0, progress=None)
    scale = family.cache_specs(config)[0].scale
    return model, functools.partial(Sequence, model, config.num_layers, scale)


def random_ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, SIZES["vocab_size"], (count,), generator=generator).tolist()
