"""Formats in which GGUF files keep matrices: each row is a run of blocks, each a few small integers
with a scale of their own. (ggml-org/ggml, ggml-common.h, has the layouts.)

    Q4_0   f16 d, 32 nibbles          d (q - 8)
    Q4_1   f16 d, f16 m, 32 nibbles   d q + m
    Q8_0   f16 d, 32 signed bytes     d q

Nibbles: the low halves of all bytes, then the high ones. Products are exact in float32, so a value
is the same whether the sum behind it is rounded apart or fused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class BlockFormat:
    """`elements` numbers in `num_bytes` bytes; `number` is GGML's for the type. `expand` takes
    blocks, uint8 [..., num_bytes], to float32 [..., elements].
    """

    number: int
    elements: int
    num_bytes: int
    expand: Callable[[Tensor], Tensor]


def _half(blocks: Tensor, start: int) -> Tensor:
    """The f16 at byte `start` of each block, as float32 [..., 1]."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    return torch.cat((packed & 15, packed >> 4), -1).float()


def _q4_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[..., 2:]) - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _nibbles(blocks[..., 4:]) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * blocks[..., 2:].view(torch.int8).float()


FORMATS = {
    "Q4_0": BlockFormat(2, 32, 18, _q4_0),
    "Q4_1": BlockFormat(3, 32, 20, _q4_1),
    "Q8_0": BlockFormat(8, 32, 34, _q8_0),
}


def row_bytes(format: str, size: int) -> int:
    """The bytes of a row of `size` elements, which fill whole blocks."""
    blocks = FORMATS[format]
    assert size % blocks.elements == 0, f"{format} has no rows of {size}"
    return size // blocks.elements * blocks.num_bytes


def row_size(format: str, num_bytes: int) -> int:
    """The elements of a row of `num_bytes`: the inverse of `row_bytes`."""
    blocks = FORMATS[format]
    assert num_bytes % blocks.num_bytes == 0, f"{format} has no rows of {num_bytes} bytes"
    return num_bytes // blocks.num_bytes * blocks.elements


def expand(w: Tensor, format: str) -> Tensor:
    """Rows of blocks, uint8 [..., bytes], to float32 [..., K]."""
    blocks = FORMATS[format]
    return blocks.expand(w.view(*w.shape[:-1], -1, blocks.num_bytes)).flatten(-2)
