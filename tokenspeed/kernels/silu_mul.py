"""`silu_mul`: the gate of SwiGLU, silu(gate) * up, on the merged projection's output.

The operand is the merged tensor, gate [.., I] before up [.., I], as the one linear layer of both
makes it: a kernel reads it in place. Shapes: gate_up [T, 2 I] -> [T, I].
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.triton_jit import assert_rows, block_of, jit, tl

_BLOCK = 1024
"""Columns a program: a row of a large MLP has more than one program should hold."""


def reference(gate_up: Tensor) -> Tensor:
    """silu(gate) * up."""
    size = gate_up.shape[-1] // 2
    gate, up = torch.split(gate_up, [size, size], -1)
    out: Tensor = F.silu(gate) * up
    return out


@jit
def _silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_up, out, token_stride, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (token, block of columns). silu is rounded to the dtype before it is multiplied, as
    the reference does.
    """
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < N
    start = gate_up + token * token_stride + column
    gate = tl.load(start, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(start + N, mask=mask, other=0.0).to(tl.float32)
    gate = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + token * N + column, (gate * up).to(out.dtype.element_ty), mask=mask)


def launch(gate_up: Tensor) -> Tensor:
    assert gate_up.dim() == 2 and gate_up.shape[1] % 2 == 0, f"silu_mul of {gate_up.shape}"
    assert_rows("silu_mul", gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_tokens, size, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        block = min(_BLOCK, block_of(size))
        grid = (num_tokens, -(-size // block))
        _silu_mul_kernel[grid](gate_up, out, gate_up.stride(0), N=size, BLOCK=block, num_warps=4)
    return out


def _fake(gate_up: Tensor) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("silu_mul(Tensor gate_up) -> Tensor")
_library.impl("silu_mul", reference, "CPU")
_library.impl("silu_mul", launch, "CUDA")
torch.library.register_fake("tokenspeed::silu_mul", _fake, lib=_library)

silu_mul = torch.ops.tokenspeed.silu_mul.default
