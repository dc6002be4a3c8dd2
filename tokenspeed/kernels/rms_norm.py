"""`rms_norm` and `add_rms_norm`: RMSNorm of rows, alone or of a sum that is returned as well.

Functional ops that passes put in the place of what models spell out. In float32, whatever the
dtype of x. Shapes: x and residual [T, N] or [T, H, N], weight [N], of one dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import (
    assert_rows,
    block_of,
    gdc,
    heads_of,
    jit,
    launches_early,
    tl,
)


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) in float32, cast back, times a weight."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight


def add_rms_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, and that sum."""
    total = x + residual
    return rms_norm_reference(total, weight, eps), total


@jit
def _rms_norm_kernel(  # type: ignore[no-untyped-def]
    x, residual, weight, out, total, x_token, x_head, r_token, r_head, eps,
    HEADS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One row: program (token, head). Every value is float32 from its load to its store, and
    rounded where the reference rounds.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, BLOCK)
    mask = column < N
    scale = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    row = tl.load(x + token * x_token + head * x_head + column, mask=mask, other=0.0).to(tl.float32)
    to = (token * HEADS + head) * N + column
    if ADD:
        other = tl.load(residual + token * r_token + head * r_head + column, mask=mask, other=0.0)
        row += other.to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        tl.store(total + to, rounded, mask=mask)
        row = rounded.to(tl.float32)
    row *= tl.rsqrt(tl.sum(row * row, axis=0) / N + eps)
    row = row.to(out.dtype.element_ty).to(tl.float32) * scale
    tl.store(out + to, row.to(out.dtype.element_ty), mask=mask)


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    name = "rms_norm" if residual is None else "add_rms_norm"
    other = x if residual is None else residual
    assert_rows(name, x, other, weight)
    assert weight.shape == x.shape[-1:], f"{name}: weight {weight.shape} of rows {x.shape}"
    assert other.shape == x.shape, f"{name}: x {x.shape} and residual {other.shape}"
    assert x.dtype == other.dtype == weight.dtype, (
        f"{name}: {x.dtype}, {other.dtype}, {weight.dtype}"
    )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = out if residual is None else torch.empty_like(out)
    if out.numel():
        rows, others = heads_of(x), heads_of(other)
        num_tokens, num_heads, size = rows.shape
        block, early = block_of(size), launches_early()
        _rms_norm_kernel[num_tokens, num_heads](
            rows, others, weight, out, total, *rows.stride()[:2], *others.stride()[:2], eps,
            HEADS=num_heads, N=size, BLOCK=block, ADD=residual is not None, EARLY=early,
            num_warps=8 if block > 2048 else 4 if block > 256 else 1, launch_pdl=early,
        )  # fmt: skip
    return out, total


def launch_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _launch(x, None, weight, eps)[0]


def launch_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return _launch(x, residual, weight, eps)


def _fake_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _fake_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor")
_library.impl("rms_norm", rms_norm_reference, "CPU")
_library.impl("rms_norm", launch_rms_norm, "CUDA")
torch.library.register_fake("tokenspeed::rms_norm", _fake_rms_norm, lib=_library)
_library.define(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
)
_library.impl("add_rms_norm", add_rms_norm_reference, "CPU")
_library.impl("add_rms_norm", launch_add_rms_norm, "CUDA")
torch.library.register_fake("tokenspeed::add_rms_norm", _fake_add_rms_norm, lib=_library)

rms_norm = torch.ops.tokenspeed.rms_norm.default
add_rms_norm = torch.ops.tokenspeed.add_rms_norm.default
