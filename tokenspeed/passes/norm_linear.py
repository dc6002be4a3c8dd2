"""Fuse an RMSNorm into the one linear layer that reads it.

Before: rms norm -> mm(normed, permute(w))        After: norm_linear
Why: with few tokens a kernel of its own for the norm takes as long as many megabytes of weights.
Silent where the normed rows are used elsewhere, too, and where dtypes differ. Has to run before
`add_rms_norm`, which would take the norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.linear import norm_linear, norm_linear_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import factor, is_normed, products, refuse_product, refuse_vector


def replacement(
    x: Tensor, norm: Tensor, w: Tensor, bias: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    out: Tensor = norm_linear(x, norm, w, bias, eps)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    operands = (context.empty(5, 24), context.empty(24), context.empty(40, 24))
    return [
        Case(each, {"eps": eps})
        for eps in context.eps
        for each in (operands, (*operands, context.empty(40)))
    ]


def check(operands: Operands) -> str | None:
    x = operands["x"]
    reason = refuse_product(x, operands["w"], operands.get("bias"))
    return reason or refuse_vector("norm", operands["norm"], x)


def expected(graph: fx.Graph) -> int:
    """Products of normed rows that nothing else reads."""
    rows = (factor(product) for product in products(graph))
    return sum(is_normed(each) and len(each.users) == 1 for each in rows)


PASS = Rewrite(
    name="norm_linear",
    pattern=norm_linear_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    given=("norm", "w", "bias"),
    expected=expected,
)
