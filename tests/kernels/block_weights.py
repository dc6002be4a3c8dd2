"""Random weights in blocks, for tests."""

from __future__ import annotations

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from torch import Tensor


def packed(format: str, num_rows: int, size: int) -> Tensor:
    """Rows as the gguf package quantises them, uint8 [num_rows, bytes]."""
    values = np.random.default_rng(num_rows).standard_normal((num_rows, size), dtype=np.float32)
    return torch.from_numpy(quants.quantize(values, GGMLQuantizationType[format]))


def unpacked(format: str, w: Tensor) -> Tensor:
    """The same rows as the gguf package dequantises them, float32 [num_rows, size]."""
    values = quants.dequantize(w.numpy(), GGMLQuantizationType[format])
    return torch.from_numpy(np.ascontiguousarray(values))
