"""What the kernels of linear layers share: a call's operands, its prologue and its epilogue.

Every value is float32 from its load to its store, and rounded where the references round.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tokenspeed.kernels.triton_jit import assert_rows, jit, tl


@dataclass(frozen=True)
class LinearCall:
    """epilogue(prologue(x) w^T + bias), with x [T, K] and w [N, K].

    The prologue is an RMSNorm if there is a `norm` [K]. The epilogue adds `residual` [T, N], or
    with `gate` is silu(first half) * second half of each token's N values.
    """

    x: Tensor
    w: Tensor
    bias: Tensor | None = None
    norm: Tensor | None = None
    eps: float = 0.0
    residual: Tensor | None = None
    gate: bool = False

    @property
    def num_rows(self) -> int:
        """Columns of the result."""
        return self.w.shape[0] // 2 if self.gate else self.w.shape[0]

    def check(self, name: str) -> None:
        """What kernels take for granted."""
        x, w = self.x, self.w
        assert x.dim() == w.dim() == 2 and x.shape[1] == w.shape[1], f"{name}: {x.shape}, {w.shape}"
        assert w.is_contiguous(), f"{name}: the weight's strides are {w.stride()}"
        assert not self.gate or (w.shape[0] % 2 == 0 and self.bias is None), f"{name}: {w.shape}"
        vectors = {"bias": (self.bias, w.shape[0]), "norm": (self.norm, x.shape[1])}
        for what, (vector, size) in vectors.items():
            assert vector is None or vector.shape == (size,), f"{name}: {what} of {w.shape}"
        added = self.residual
        assert added is None or added.shape == (x.shape[0], w.shape[0]), f"{name}: the residual"
        others = [t for t in (w, self.bias, self.norm, added) if t is not None]
        assert_rows(name, x, *others)
        assert all(t.dtype == x.dtype for t in others), f"{name}: {[t.dtype for t in (x, *others)]}"

    def operands(self, out: Tensor) -> tuple[Tensor, ...]:
        """x, norm, w, bias, residual, out; what is absent is never read."""
        absent = self.x
        rest = (self.norm, self.w, self.bias, self.residual)
        return (self.x, *(absent if each is None else each for each in rest), out)

    def strides(self) -> tuple[int, int]:
        return self.x.stride(0), 0 if self.residual is None else self.residual.stride(0)

    def flags(self) -> dict[str, bool]:
        return {
            "NORM": self.norm is not None,
            "GATE": self.gate,
            "BIAS": self.bias is not None,
            "ADD": self.residual is not None,
        }


@jit
def norm_row(row, scale, eps, K, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """The RMSNorm of one row of K elements, in float32; elements beyond are 0."""
    row *= tl.rsqrt(tl.sum(row * row, axis=0) / K + eps)
    return (row.to(dtype).to(tl.float32) * scale.to(tl.float32)).to(dtype).to(tl.float32)


@jit
def finish_tile(  # type: ignore[no-untyped-def]
    total, up, bias, residual, mask, dtype: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The epilogue of sums of any shape; `bias` and `residual` point to a value for each."""
    if BIAS:
        total += tl.load(bias, mask=mask, other=0.0).to(tl.float32)
    total = total.to(dtype)
    if GATE:
        gate = total.to(tl.float32)
        gate = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        total = (gate * up.to(dtype).to(tl.float32)).to(dtype)
    if ADD:
        added = tl.load(residual, mask=mask, other=0.0).to(tl.float32)
        total = (total.to(tl.float32) + added).to(dtype)
    return total
