"""The layers that every family shares, each as the paper writes it.

T tokens, H hidden size, N heads, D head size, R rotated elements of a head (D, or less)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokenspeed.models.rope import Rope


class RMSNorm(nn.Module):
    """x / rms(x) in float32, cast back, times a weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight


class MergedLinear(nn.Linear):
    """Several projections of one input, their rows stacked into one weight: `sizes` rows each.

    The checkpoint keeps them apart; `WEIGHTS` says which tensor fills which slot.
    """

    def __init__(self, in_features: int, sizes: list[int], bias: bool) -> None:
        super().__init__(in_features, sum(sizes), bias)
        self.sizes = sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return torch.split(F.linear(x, self.weight, self.bias), self.sizes, -1)


class RotaryEmbedding(nn.Module):
    """Angles of positions, computed once a forward pass and shared by all layers."""

    inv_freq: Tensor

    def __init__(self, rope: Rope) -> None:
        super().__init__()
        self.frequencies, self.scale = rope.inv_freq, rope.scale
        inv_freq = torch.empty(len(rope.inv_freq), dtype=torch.float32)
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def fill(self) -> None:
        """Write the frequencies. A model is built without storage, so its constructor cannot."""
        self.inv_freq.copy_(torch.tensor(self.frequencies, dtype=torch.float32))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] -> cos and sin, each float32 [T, 1, R / 2]."""
        angles = positions.float()[:, None, None] * self.inv_freq
        return angles.cos() * self.scale, angles.sin() * self.scale


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R / 2) of each head of x [T, N, D] by their angles, in float32."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
