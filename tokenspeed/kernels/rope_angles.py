"""`rope_angles`: cosines and sines of positions, once a step and shared by all layers.

Shapes: positions [T] of integers, inv_freq float32 [R / 2] -> cos and sin, each float32
[T, 1, R / 2], both times `scale`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import assert_rows, jit, tl

_BLOCK = 1024


def reference(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cos and sin of positions * inv_freq."""
    angles = positions.float()[:, None, None] * inv_freq
    if scale == 1.0:  # as a graph has it, from which a product with 1.0 is gone
        return angles.cos(), angles.sin()
    return angles.cos() * scale, angles.sin() * scale


@jit
def _rope_angles_kernel(  # type: ignore[no-untyped-def]
    positions, inv_freq, cos, sin, scale, count, HALF: tl.constexpr, BLOCK: tl.constexpr
):
    """Elements of the results, in order, `count` in all."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    position = tl.load(positions + at // HALF, mask=mask, other=0).to(tl.float32)
    angle = position * tl.load(inv_freq + at % HALF, mask=mask, other=0.0)
    tl.store(cos + at, tl.cos(angle) * scale, mask=mask)
    tl.store(sin + at, tl.sin(angle) * scale, mask=mask)


def launch(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    assert positions.dim() == inv_freq.dim() == 1, f"{positions.shape}, {inv_freq.shape}"
    assert inv_freq.dtype == torch.float32, f"rope_angles: frequencies in {inv_freq.dtype}"
    assert not positions.is_floating_point(), f"rope_angles: positions in {positions.dtype}"
    assert_rows("rope_angles", positions, inv_freq)
    cos, sin = _fake(positions, inv_freq, scale)
    if count := cos.numel():
        grid = (-(-count // _BLOCK),)
        _rope_angles_kernel[grid](
            *(positions, inv_freq, cos, sin, scale, count),
            HALF=inv_freq.shape[0],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return cos, sin


def _fake(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, inv_freq.shape[0])
    return inv_freq.new_empty(shape), inv_freq.new_empty(shape)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rope_angles(Tensor positions, Tensor inv_freq, float scale) -> (Tensor, Tensor)")
_library.impl("rope_angles", reference, "CPU")
_library.impl("rope_angles", launch, "CUDA")
torch.library.register_fake("tokenspeed::rope_angles", _fake, lib=_library)

rope_angles = torch.ops.tokenspeed.rope_angles.default
