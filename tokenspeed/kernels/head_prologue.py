"""The prologue of attention on a tile of heads, as a part of other kernels: an RMSNorm of each
head, then RoPE, rounded where the references in `qk_norm_rope` round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.triton_jit import assert_rows, jit, tl


@jit
def prepared_heads(  # type: ignore[no-untyped-def]
    heads, is_head, weight, cos, sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Heads of one token, by the pointers [H] to their first elements, as attention takes them:
    [H, BLOCK] of their dtype, 0 behind D. cos and sin point to the token's R / 2 = HALF angles.

    A turned element needs its partner, HALF away: each head is read a second time in the partners'
    order, from the cache, which spares a shuffle of registers.
    """
    i = tl.arange(0, BLOCK)
    mask = is_head[:, None] & (i < D)[None, :]
    own = tl.load(heads[:, None] + i[None, :], mask=mask, other=0.0)
    if ROPE:
        kind = own.dtype
        angle = tl.where(i < HALF, i, i - HALF)
        j = tl.where(i < HALF, i + HALF, tl.where(i < 2 * HALF, i - HALF, i))
        partner = tl.load(heads[:, None] + j[None, :], mask=mask, other=0.0).to(tl.float32)
        own = own.to(tl.float32)
        if NORM:
            scale = tl.rsqrt(tl.sum(own * own, axis=1) / D + eps)[:, None]
            own_weight = tl.load(weight + i, mask=i < D, other=0.0).to(tl.float32)[None, :]
            weight_of_partner = tl.load(weight + j, mask=i < D, other=0.0).to(tl.float32)[None, :]
            own = (own * scale).to(kind).to(tl.float32) * own_weight
            own = own.to(kind).to(tl.float32)
            partner = (partner * scale).to(kind).to(tl.float32) * weight_of_partner
            partner = partner.to(kind).to(tl.float32)
        c = tl.load(cos + angle, mask=i < 2 * HALF, other=1.0)
        s = tl.load(sin + angle, mask=i < 2 * HALF, other=0.0)
        s = tl.where(i < HALF, -s, s)
        own = (own * c[None, :] + partner * s[None, :]).to(kind)
    return own


class PrologueOperands(NamedTuple):
    """A prologue as kernel arguments: what is missing is replaced by a tensor nobody reads."""

    q_weight: Tensor
    k_weight: Tensor
    cos: Tensor
    sin: Tensor
    cos_token: int
    sin_token: int
    eps: float
    flags: dict[str, Any]
    """Compile-time constants: HALF, NORM, ROPE."""


def operands_of(name: str, q: Tensor, prologue: Prologue | None) -> PrologueOperands:
    if prologue is None:
        flags = {"HALF": 0, "NORM": False, "ROPE": False}
        return PrologueOperands(q, q, q, q, 0, 0, 0.0, flags)
    q_weight, k_weight, cos, sin, eps = prologue
    half, size = cos.shape[-1], q.shape[-1]
    assert cos.shape == sin.shape == (q.shape[0], 1, half), f"{name}: cos {cos.shape} of {q.shape}"
    assert cos.dtype == sin.dtype == torch.float32, f"{name}: angles in {cos.dtype}, {sin.dtype}"
    assert 0 < 2 * half <= size, f"{name}: {half} angles of heads of {size}"
    assert_rows(name, q, cos, sin)
    for weight in (q_weight, k_weight):
        assert weight is None or (weight.shape == (size,) and weight.is_contiguous()), (
            f"{name}: weight {weight.shape} of heads of {size}"
        )
        assert weight is None or weight.dtype == q.dtype, f"{name}: weight of {weight.dtype}"
    assert (q_weight is None) == (k_weight is None), f"{name}: a norm of q alone, or of k alone"
    flags = {"HALF": half, "NORM": q_weight is not None, "ROPE": True}
    return PrologueOperands(
        q if q_weight is None else q_weight, q if k_weight is None else k_weight,
        cos, sin, cos.stride(0), sin.stride(0), eps, flags,
    )  # fmt: skip
