"""`rows`: a linear layer for few tokens on x86 (`cpu/rows.cpp`).

torch's matrix products are made for many rows of x. With 2 to 64 they spend their time packing the
weight, and read it at a fraction of the memory's speed. This one reads a weight once, where it lies
in its plain layout: four of its rows times up to four tokens are summed in registers while the
next four rows are fetched. So no second copy of a weight is ever made.

An element is summed in one order, whatever the number of tokens: a token's result does not depend
on its neighbours, bit for bit. Against torch it differs by float rounding.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""x [T, K], w [N, K], bias [N] or None -> [T, N]."""

_ROWS, _WIDTH = 4, 16
"""What a weight's two sizes must divide by."""


def bind(library: ctypes.CDLL) -> Linear:
    """The kernel in `library`. AttributeError if it is not there.

    What the kernel does not serve (other dtypes, strides and sizes) goes to torch.
    """
    function = library.tokenspeed_linear_rows
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 4

    float32, count_threads = torch.float32, torch.get_num_threads

    def rows(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        # Written out for speed: a small model calls this hundred times in 20 ms.
        (num_tokens, size), num_rows = x.shape, w.shape[0]
        served = num_rows % _ROWS == 0 and size % _WIDTH == 0
        for each in (x, w) if bias is None else (x, w, bias):
            served = served and each.dtype is float32 and each.is_contiguous()
        if not served:
            return F.linear(x, w, bias)
        out = x.new_empty((num_tokens, num_rows))
        start = None if bias is None else bias.data_ptr()
        pointers = x.data_ptr(), w.data_ptr(), start, out.data_ptr()
        function(*pointers, num_tokens, num_rows, size, count_threads())
        return out

    return rows


def serves(w: Tensor) -> bool:
    """Is the kernel made for this weight?"""
    num_rows, size = w.shape
    fits = num_rows % _ROWS == 0 and size % _WIDTH == 0
    return fits and w.dtype is torch.float32 and w.is_contiguous()
