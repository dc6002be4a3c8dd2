"""Gluon, the layer below Triton's language, where its kernels can run: on Hopper.

Its programs place their data and share out their warps themselves. It has no interpreter, and it is
declared experimental: what compiles with one Triton need not with the next. So a kernel in it is
one of several ways to do a thing, and `runs_gluon` says whether it can be taken.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tokenspeed.kernels.triton_jit import HAS_KERNELS, INTERPRETED, CompilesAhead

__all__ = [
    "HAS_GLUON",
    "TensorDescriptor",
    "fence_async_shared",
    "gl",
    "gluon_jit",
    "mbarrier",
    "num_multiprocessors",
    "runs_gluon",
    "tma",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

_VERSION = "3.6."
"""Of Triton: others were not tried."""

HAS_GLUON = False

if HAS_KERNELS and not INTERPRETED:
    import triton

    HAS_GLUON = triton.__version__.startswith(_VERSION)

if HAS_GLUON:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon._runtime import GluonJITFunction
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    class _GluonKernel(CompilesAhead, GluonJITFunction):  # type: ignore[misc]
        """As `triton_jit.jit` makes them."""
else:
    gl = mbarrier = tma = TensorDescriptor = None
    fence_async_shared = warpgroup_mma = warpgroup_mma_wait = None


def gluon_jit(kernel: Callable[..., Any], varying: Sequence[str] = ()) -> Any:
    """As `triton_jit.jit`."""
    return _GluonKernel(kernel, do_not_specialize=list(varying)) if HAS_GLUON else kernel


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Kernels for Hopper run on Hopper alone: what comes after it has other matrix units."""
    return HAS_GLUON and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
