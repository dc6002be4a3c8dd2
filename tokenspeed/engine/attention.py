"""Which attention backend runs, and how it is made."""

from __future__ import annotations

import torch

from tokenspeed.config import Config
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.triton_jit import HAS_KERNELS
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.options import ConfigError

Attention = TorchAttention | TritonAttention

ATTENTION_BACKENDS: dict[str, type[Attention]] = {
    "torch": TorchAttention,
    "triton": TritonAttention,
}

BEST = {"cpu": "torch", "cuda": "triton"}
"""What `auto` means, by device type."""


def attention_backend(config: Config, device: torch.device) -> type[Attention]:
    """The backend that the settings mean. Raises ConfigError where it cannot run."""
    name = config.compile.attention_backend
    backend = ATTENTION_BACKENDS[BEST[device.type] if name == "auto" else name]
    if backend is TritonAttention and not HAS_KERNELS:
        raise ConfigError("--attention-backend triton: its kernels need CUDA; use torch on a CPU")
    return backend


def make_attention(
    backend: type[Attention], groups: list[CacheGroup], pool: PagePool, slots: Slots
) -> Attention:
    if issubclass(backend, TritonAttention):
        return backend(groups, pool, slots.device_tables)
    return backend(groups, pool)
