"""Kernels for weights in blocks on x86 (`cpu/blocks.cpp`), by format.

`linear` gives each token the bits that `rows` gives it with the expanded weight, whatever the
number of tokens.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.block_formats import FORMATS


@dataclass(frozen=True)
class BlockKernels:
    """The two functions of a loaded object. Operands are contiguous, x and bias float32, weights
    uint8.
    """

    _linear: Any
    _expand: Any

    def linear(self, x: Tensor, w: Tensor, format: str, bias: Tensor | None) -> Tensor:
        """x [T, K], w [N, bytes of K elements], bias [N] -> [T, N]."""
        (num_tokens, size), num_rows = x.shape, w.shape[0]
        out = x.new_empty((num_tokens, num_rows))
        start = None if bias is None else bias.data_ptr()
        pointers = x.data_ptr(), w.data_ptr(), start, out.data_ptr()
        threads = torch.get_num_threads()
        self._linear(FORMATS[format].number, *pointers, num_tokens, num_rows, size, threads)
        return out

    def expand(self, w: Tensor, format: str, out: Tensor) -> None:
        """w [N, bytes of K elements] into out [N, K]."""
        number, threads = FORMATS[format].number, torch.get_num_threads()
        self._expand(number, w.data_ptr(), out.data_ptr(), *out.shape, threads)


def bind(library: ctypes.CDLL) -> BlockKernels:
    """The kernels in `library`. AttributeError if they are not there."""
    linear, expand = library.tokenspeed_blocks_linear, library.tokenspeed_blocks_expand
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    linear.argtypes = [number, *[pointer] * 4, *[number] * 4]
    expand.argtypes = [number, *[pointer] * 2, *[number] * 3]
    linear.restype = expand.restype = None
    return BlockKernels(linear, expand)
