"""Model families as plain PyTorch modules; `MODELS` maps an architecture name to its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.models import llama, qwen2, qwen3
from tokenspeed.models.family import Family
from tokenspeed.text.architectures import architecture_of

MODELS: dict[str, Family] = {
    "LlamaForCausalLM": llama.FAMILY,
    "Qwen2ForCausalLM": qwen2.FAMILY,
    "Qwen3ForCausalLM": qwen3.FAMILY,
}


def family_of(hf_config: Mapping[str, Any]) -> Family:
    """The family of a config.json, by its first known architecture. Raises ModelError."""
    return MODELS[architecture_of(hf_config)]
