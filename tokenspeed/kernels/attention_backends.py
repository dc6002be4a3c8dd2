"""The attention backends by name. Each says of a layer's spec whether it serves it (`supports`)."""

from __future__ import annotations

from tokenspeed.kernels.attention_flashinfer import FlashInferAttention
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention

Attention = TorchAttention | TritonAttention

ATTENTION_BACKENDS: dict[str, type[Attention]] = {
    "torch": TorchAttention,
    "triton": TritonAttention,
    "flashinfer": FlashInferAttention,
}
