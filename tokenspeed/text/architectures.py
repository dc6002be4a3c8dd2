"""The model families that can be served, by name alone: to ask for them takes no torch.

So a checkpoint of another family is refused for its family, before its tokenizer or its weights are
looked at. What the families are is in `tokenspeed.models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenspeed.text.errors import ModelError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


def architecture_of(hf_config: Mapping[str, Any]) -> str:
    """The first architecture of a config.json that can be served. Raises ModelError."""
    found = hf_config.get("architectures") or ["none is named"]
    names = found if isinstance(found, list) else [found]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    shown, known = ", ".join(map(str, names)), ", ".join(ARCHITECTURES)
    raise ModelError(
        f"config.json: the model family {shown!a:.99} is not supported (supported: {known}); give "
        "a model of one of these families"
    )
