"""Triton, where kernels can run: with a CUDA device's torch, or in Triton's interpreter.

A CPU needs no kernel, and its torch comes without Triton: there `jit` leaves a function alone, and
`launch` is never reached. The interpreter is asked for by TRITON_INTERPRET=1, which Triton reads
while it decorates, so it has to be set before this file is imported.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.triton_watch import watch

__all__ = [
    "HAS_KERNELS",
    "INTERPRETED",
    "AsyncCompileMode",
    "CompilesAhead",
    "assert_rows",
    "block_of",
    "compiling_ahead",
    "gdc",
    "heads_of",
    "jit",
    "launches_early",
    "load_driver",
    "tl",
]

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_KERNELS = torch.version.cuda is not None or INTERPRETED

_only_compiles = False


class CompilesAhead:
    """Mixed into kernels: one is only compiled where `compiling_ahead` says so."""

    def run(self, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        run: Callable[..., Any] = super().run  # type: ignore[misc]
        return run(*args, grid=grid, warmup=warmup or _only_compiles, **options)


if HAS_KERNELS:
    import triton
    import triton.language as tl
    from triton import AsyncCompileMode
    from triton.language.extra.cuda import gdc

    class _Kernel(CompilesAhead, triton.JITFunction):  # type: ignore[misc]
        """As `jit` makes them."""

    if torch.version.cuda is not None:
        watch(triton.knobs)
else:
    triton = tl = gdc = AsyncCompileMode = None


def jit(kernel: Callable[..., Any], varying: Sequence[str] = ()) -> Any:
    """Compile `kernel` when it is first launched. Of an integer argument named in `varying`, Triton
    shall not care whether it is 1 or a multiple of 16: it would compile a kernel for each case.
    """
    if not HAS_KERNELS:
        return kernel
    if INTERPRETED:
        return triton.jit(kernel, do_not_specialize=list(varying))
    return _Kernel(kernel, do_not_specialize=list(varying))


@contextlib.contextmanager
def compiling_ahead() -> Iterator[None]:
    """Launches meanwhile run nothing, and what they would have written is undefined: the kernels
    that they need are compiled, on all cores at once, and are there in the end.
    """
    global _only_compiles
    if INTERPRETED:
        yield
        return
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool):
        _only_compiles = True
        try:
            yield
        finally:
            _only_compiles = False


def load_driver() -> object:
    """Have Triton load the module by which it talks to the device (or compile it, for half a
    second), from the cache that it has now. Else it does so when it first needs it, which may be
    while a program is loaded, whose objects have a cache of their own. Raises what Triton raises
    without a compiler.
    """
    return triton.runtime.driver.active


@functools.cache
def launches_early() -> bool:
    """May a kernel begin before the one in front has ended (programmatic dependent launch)?"""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


def block_of(size: int) -> int:
    """The power of two that holds `size` elements."""
    return 1 << (size - 1).bit_length()


def heads_of(x: Tensor) -> Tensor:
    """x [T, N] as one head of each token, or [T, H, N] as it is."""
    assert x.dim() in (2, 3), (
        f"a kernel takes [tokens, size] or [tokens, heads, size], not {x.shape}"
    )
    return x.unsqueeze(1) if x.dim() == 2 else x


def assert_rows(name: str, x: Tensor, *others: Tensor) -> None:
    """Kernels address rows by strides, and within a row step by one."""
    for each in (x, *others):
        assert each.stride(-1) == 1, f"{name}: rows must lie dense, got strides {each.stride()}"
        assert each.device == x.device, f"{name}: operands on {x.device} and {each.device}"
