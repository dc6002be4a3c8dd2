"""Which model is served, where and in which dtype: settings settled by what was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tokenspeed.config import Config
from tokenspeed.loader import block_layout
from tokenspeed.models import family_of
from tokenspeed.models.blocks import pack
from tokenspeed.models.family import DecoderConfig, Family
from tokenspeed.options import ConfigError
from tokenspeed.spans import span
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import ModelSource, resolve_model

DTYPES = {
    "half": torch.float16,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float": torch.float32,
    "float32": torch.float32,
}


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is served, all of it settled."""

    source: ModelSource
    family: Family
    config: DecoderConfig
    device: torch.device
    dtype: torch.dtype
    layout: Mapping[str, str]
    """Modules whose weight stays in blocks, as the checkpoint stores it: path -> format."""

    def make(self) -> nn.Module:
        return pack(self.family.model(self.config), self.layout)

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def resolve_device(name: str) -> torch.device:
    """The device that a setting means."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch sees no CUDA device here; use --device cpu")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device, hf_config: dict[str, Any]) -> torch.dtype:
    """The dtype that a setting means; "auto" is float32 on a CPU, else the checkpoint's."""
    if name == "auto":
        stored = hf_config.get("torch_dtype")
        name = "float32" if device.type == "cpu" else str(stored or "bfloat16")
    if name not in DTYPES:
        raise ModelError(f"the checkpoint's dtype {name!r} is not supported; set --dtype")
    return DTYPES[name]


def resolve_layout(
    config: Config, source: ModelSource, family: Family, device: torch.device, dtype: torch.dtype
) -> Mapping[str, str]:
    """What can stay in blocks: matrices of a GGUF that is computed with in float32 on a CPU."""
    are_read = config.model.load_format in ("auto", "gguf")
    is_served = device.type == "cpu" and dtype == torch.float32
    if not (are_read and is_served) or config.compile.weight_layout == "plain":
        return {}
    return block_layout(source.tensors, family.weights)


def resolve_served(config: Config, *, need_weights: bool = True) -> ServedModel:
    """Find the model and settle what the settings leave open. Raises ModelError or ConfigError."""
    wanted = config.model
    with span("model.source"):
        source = resolve_model(
            wanted.model,
            revision=wanted.revision,
            download_dir=wanted.download_dir,
            need_weights=need_weights and wanted.load_format != "dummy",
        )
    family = family_of(source.config)
    device = resolve_device(wanted.device)
    dtype = resolve_dtype(wanted.dtype, device, source.config)
    return ServedModel(
        source=source,
        family=family,
        config=family.config.from_dict(source.config, wanted.max_model_len),
        device=device,
        dtype=dtype,
        layout=resolve_layout(config, source, family, device, dtype),
    )
