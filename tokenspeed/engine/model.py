"""Which model is served: found, and with the settings that it settles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tokenspeed.config import Config
from tokenspeed.draft import Resolution
from tokenspeed.engine.facts import machine_facts, model_facts
from tokenspeed.kv.pool import KV_DTYPES
from tokenspeed.loader import block_layout
from tokenspeed.models import family_of
from tokenspeed.models.blocks import pack
from tokenspeed.models.family import DecoderConfig, Family
from tokenspeed.resolve import resolve
from tokenspeed.spans import span
from tokenspeed.text.source import ModelSource, resolve_model


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """What is served, all of it settled."""

    source: ModelSource
    family: Family
    config: DecoderConfig
    resolution: Resolution
    layout: Mapping[str, str]
    """Modules whose weight stays in blocks, as the checkpoint stores it: path -> format."""

    def make(self) -> nn.Module:
        return pack(self.family.model(self.config), self.layout)

    @property
    def settings(self) -> Config:
        """Those of the start, settled."""
        return self.resolution.config

    @property
    def device(self) -> torch.device:
        return torch.device(self.settings.model.device)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.settings.model.dtype)
        return dtype

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the cache."""
        return KV_DTYPES[self.settings.cache.kv_cache_dtype]

    @property
    def dtype_name(self) -> str:
        return self.settings.model.dtype


def resolve_layout(settings: Config, source: ModelSource, family: Family) -> Mapping[str, str]:
    """What can stay in blocks: matrices of a GGUF that is computed with in float32 on a CPU."""
    model = settings.model
    is_served = (model.load_format, model.device, model.dtype) == ("gguf", "cpu", "float32")
    if not is_served or settings.compile.weight_layout == "plain":
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
    numbers = family.config.from_dict(source.config, wanted.max_model_len)
    facts = model_facts(source, family, numbers)
    resolution = resolve(config, machine_facts(config), facts)
    return ServedModel(
        source=source,
        family=family,
        config=numbers,
        resolution=resolution,
        layout=resolve_layout(resolution.config, source, family),
    )
