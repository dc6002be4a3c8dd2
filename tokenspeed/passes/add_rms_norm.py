"""Fuse a residual sum with the RMSNorm after it.

Before: add -> (the sum, rms norm of it)        After: add_rms_norm -> (normed, sum)
Why: the hidden state is read and written once less, twice a block. Has to run before `rms_norm`,
which would take the norm alone, and before Inductor folds the sum into a matrix product. Silent
where x, residual and weight differ in dtype, and where one of them is broadcast.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.rms_norm import add_rms_norm, add_rms_norm_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import aten, calls, norms, refuse_rows, refuse_vector


def replacement(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    normed, total = add_rms_norm(x, residual, weight, eps)
    return normed, total


def cases(context: PassContext) -> Sequence[Case]:
    rows, weight = (context.empty(5, 24), context.empty(5, 24)), context.empty(24)
    return [Case((*rows, weight), {"eps": eps}) for eps in context.eps]


def check(operands: Operands) -> str | None:
    x, residual = operands["x"], operands["residual"]
    if reason := refuse_rows("x", x) or refuse_rows("residual", residual):
        return reason
    if x.dtype != residual.dtype:
        return f"x is {x.dtype}, residual {residual.dtype}"
    if x.shape != residual.shape:
        return f"x is {list(x.shape)}, residual {list(residual.shape)}"
    return refuse_vector("weight", operands["weight"], x)


def expected(graph: fx.Graph) -> int:
    """Norms of a sum of two tensors."""
    sums = (x for x, _ in norms(graph) if calls(x, aten.add.Tensor))
    return sum(all(isinstance(arg, fx.Node) for arg in total.args) for total in sums)


PASS = Rewrite(
    name="add_rms_norm",
    pattern=add_rms_norm_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=expected,
)
