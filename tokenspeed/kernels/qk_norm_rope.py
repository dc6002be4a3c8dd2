"""`rope` and `qk_norm_rope`: rotary positions, alone or after an RMSNorm of each head.

Shapes: x [T, H, D], weight [D] of x's dtype, cos and sin float32 [T, 1, R / 2], where the first
R <= D elements of a head are turned and the rest is left alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.rms_norm import rms_norm_reference
from tokenspeed.kernels.triton_jit import assert_rows, block_of, jit, tl


def rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + R / 2) of each head by their angles, in float32."""
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned


def qk_norm_rope_reference(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float
) -> Tensor:
    """Norm of each head, then turned."""
    return rope_reference(rms_norm_reference(x, weight, eps), cos, sin)


@jit
def _rope_kernel(  # type: ignore[no-untyped-def]
    x, weight, cos, sin, out, x_token, x_head, cos_token, sin_token, eps,
    HEADS: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    REST: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One head: program (token, head). It is read as first half, second half and, where R < D,
    the rest. Every value is float32 from its load to its store, and rounded where the reference
    rounds.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    mask = i < HALF
    source = x + token * x_token + head * x_head
    target = out + (token * HEADS + head) * D
    kind = out.dtype.element_ty
    first = tl.load(source + i, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source + HALF + i, mask=mask, other=0.0).to(tl.float32)
    if REST > 0:
        j = 2 * HALF + tl.arange(0, REST)
        rest = tl.load(source + j, mask=j < D, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first + second * second, axis=0)
        if REST > 0:
            squares += tl.sum(rest * rest, axis=0)
        scale = tl.rsqrt(squares / D + eps)
        first_weight = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
        second_weight = tl.load(weight + HALF + i, mask=mask, other=0.0).to(tl.float32)
        first = ((first * scale).to(kind).to(tl.float32) * first_weight).to(kind).to(tl.float32)
        second = ((second * scale).to(kind).to(tl.float32) * second_weight).to(kind).to(tl.float32)
        if REST > 0:
            rest_weight = tl.load(weight + j, mask=j < D, other=0.0).to(tl.float32)
            rest = (rest * scale).to(kind).to(tl.float32) * rest_weight
    c = tl.load(cos + token * cos_token + i, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + token * sin_token + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(target + i, (first * c - second * s).to(kind), mask=mask)
    tl.store(target + HALF + i, (second * c + first * s).to(kind), mask=mask)
    if REST > 0:
        tl.store(target + j, rest.to(kind), mask=j < D)


def _launch(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    name = "rope" if weight is None else "qk_norm_rope"
    assert x.dim() == 3, f"{name} takes heads [T, H, D], not {x.shape}"
    num_tokens, num_heads, size = x.shape
    half = cos.shape[-1]
    assert_rows(name, x, cos, sin, *(() if weight is None else (weight,)))
    assert cos.shape == sin.shape == (num_tokens, 1, half), f"{name}: cos {cos.shape} of {x.shape}"
    assert cos.dtype == sin.dtype == torch.float32, f"{name}: angles in {cos.dtype}, {sin.dtype}"
    assert 0 < 2 * half <= size, f"{name}: {half} angles of heads of {size}"
    if weight is not None:
        assert weight.shape == (size,), f"{name}: weight {weight.shape} of heads of {size}"
        assert weight.dtype == x.dtype, f"{name}: x is {x.dtype}, weight {weight.dtype}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        rest = size - 2 * half
        _rope_kernel[num_tokens, num_heads](
            x, x if weight is None else weight, cos, sin, out,
            *x.stride()[:2], cos.stride(0), sin.stride(0), eps,
            HEADS=num_heads, D=size, HALF=half, BLOCK=block_of(half),
            REST=block_of(rest) if rest else 0, NORM=weight is not None, num_warps=1,
        )  # fmt: skip
    return out


def launch_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _launch(x, None, cos, sin, 0.0)


def launch_qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return _launch(x, weight, cos, sin, eps)


def _fake_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _fake_qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("rope(Tensor x, Tensor cos, Tensor sin) -> Tensor")
_library.impl("rope", rope_reference, "CPU")
_library.impl("rope", launch_rope, "CUDA")
torch.library.register_fake("tokenspeed::rope", _fake_rope, lib=_library)
_library.define(
    "qk_norm_rope(Tensor x, Tensor weight, Tensor cos, Tensor sin, float eps) -> Tensor"
)
_library.impl("qk_norm_rope", qk_norm_rope_reference, "CPU")
_library.impl("qk_norm_rope", launch_qk_norm_rope, "CUDA")
torch.library.register_fake("tokenspeed::qk_norm_rope", _fake_qk_norm_rope, lib=_library)

rope = torch.ops.tokenspeed.rope.default
qk_norm_rope = torch.ops.tokenspeed.qk_norm_rope.default
