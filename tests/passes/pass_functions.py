"""Modules that passes are tried on."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SIZE = 16


class WithWeight(nn.Module):
    """`function(x, weight)`, with a weight of a dtype of its own."""

    def __init__(
        self,
        function: Callable[..., Tensor | tuple[Tensor, ...]],
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE, dtype=dtype), requires_grad=False)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)  # type: ignore[return-value]


def leaky_norm(x: Tensor, weight: Tensor) -> Tensor:
    """An RMSNorm of which more is used than its result."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (wide * scale).to(x.dtype) * weight + scale.to(x.dtype)
