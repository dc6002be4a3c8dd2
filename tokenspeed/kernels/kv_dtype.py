"""Numbers of the cache, where its dtype is not the one that is computed in.

A key or a value is divided by its layer's scale (times the reciprocal, so that torch and kernels
round alike), clamped to what the dtype holds, and rounded; attention reads that number times the
scale. Too large ones saturate, NaN stays NaN. All tokens are read so, a step's own included: a
result cannot depend on which of them were cached before.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import jit, tl


def stored(x: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` holds it, to be read times `scale`."""
    if x.dtype == dtype:
        assert scale == 1.0, f"{dtype} is kept as it is, not divided by {scale}"
        return x
    limit = limit_of(dtype)
    return (x.float() * (1 / scale)).clamp(-limit, limit).to(dtype)


def restored(x: Tensor, dtype: torch.dtype) -> Tensor:
    """What stands in the cache, in another dtype, without its scale: bytes by a table on a CPU,
    where torch converts float8_e4m3fn at a quarter of the speed.
    """
    if x.dtype == dtype:
        return x
    if x.dtype.itemsize > 1 or x.device.type != "cpu":
        return x.to(dtype)
    places = raw(x).int().flatten()
    return _values(x.dtype, dtype).index_select(0, places).view(x.shape)


@functools.cache
def _values(stored_in: torch.dtype, dtype: torch.dtype) -> Tensor:
    """What each byte stands for."""
    return torch.arange(256, dtype=torch.uint8).view(stored_in).to(dtype)


def raw(x: Tensor) -> Tensor:
    """x for operations that move numbers, which torch lacks for those of one byte."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def limit_of(dtype: torch.dtype) -> float:
    """The largest number of a dtype: 448 of float8_e4m3fn, 57344 of float8_e5m2."""
    return torch.finfo(dtype).max


@jit
def narrowed(x, inverse, like, LIMIT: tl.constexpr):  # type: ignore[no-untyped-def]
    """x as `stored` makes it of the dtype that `like` points to; `inverse`: of the scale."""
    x = tl.clamp(x.to(tl.float32) * inverse, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return x.to(like.dtype.element_ty)
