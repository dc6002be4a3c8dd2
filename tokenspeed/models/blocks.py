"""Layers that keep their weight in blocks, as the checkpoint stores it, and how a finished plain
model gets them. A model file knows nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tokenspeed.kernels.block_formats import FORMATS, row_bytes
from tokenspeed.kernels.blocks import embedding_blocks, linear_blocks
from tokenspeed.models.layers import MergedLinear


def block_weight(num_rows: int, size: int, format: str) -> nn.Parameter:
    """Room for `num_rows` rows of `size` elements."""
    rows = torch.empty(num_rows, row_bytes(format, size), dtype=torch.uint8)
    return nn.Parameter(rows, requires_grad=False)


class BlockLinear(nn.Module):
    """Takes the place of an `nn.Linear`."""

    def __init__(self, weight: nn.Parameter, format: str, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight, self.bias, self.format = weight, bias, format

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = linear_blocks(x, self.weight, self.format, self.bias)
        return out


class MergedBlockLinear(BlockLinear):
    """Takes the place of a `MergedLinear`."""

    def __init__(
        self, weight: nn.Parameter, format: str, bias: nn.Parameter | None, sizes: list[int]
    ) -> None:
        super().__init__(weight, format, bias)
        self.sizes = sizes

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return torch.split(super().forward(x), self.sizes, -1)


class BlockEmbedding(nn.Module):
    """Takes the place of an `nn.Embedding`."""

    def __init__(self, weight: nn.Parameter, format: str) -> None:
        super().__init__()
        self.weight, self.format = weight, format

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = embedding_blocks(ids, self.weight, self.format)
        return out


def pack(model: nn.Module, formats: Mapping[str, str]) -> nn.Module:
    """Replace the modules at the paths in `formats`, each by one whose weight has that format, and
    every other module that shares a weight with one of them. Returns the model, changed in place.

    Formats come from a file. What does not fit the model stays plain, for the loader to refuse.
    """
    modules = dict(model.named_modules())  # keeps what is replaced alive: an id is used once
    packed: dict[int, tuple[nn.Parameter, str]] = {}
    for path, format in formats.items():
        module = modules.get(path)
        if isinstance(module, nn.Linear | nn.Embedding):
            weight = module.weight
            num_rows, size = weight.shape
            if size % FORMATS[format].elements == 0 and id(weight) not in packed:
                packed[id(weight)] = block_weight(num_rows, size, format), format
    for path, module in modules.items():
        found = packed.get(id(getattr(module, "weight", None)))
        if found is not None:
            model.set_submodule(path, _replacement(module, *found), strict=True)
    return model


def _replacement(module: nn.Module, weight: nn.Parameter, format: str) -> nn.Module:
    if isinstance(module, nn.Embedding):
        return BlockEmbedding(weight, format)
    assert isinstance(module, nn.Linear), f"a {type(module).__name__} is not kept in blocks"
    if isinstance(module, MergedLinear):
        return MergedBlockLinear(weight, format, module.bias, module.sizes)
    return BlockLinear(weight, format, module.bias)
