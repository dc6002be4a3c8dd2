"""Fuse the first half of a SwiGLU MLP: norm, merged projection, gate.

Before: rms norm -> mm(normed, permute(w)) -> split -> silu(gate) * up        After: norm_gate_up
Why: three kernels become one, and the merged rows stay in registers. Has to run before
`norm_linear` and `silu_mul`, which would take its parts. Silent where they must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.linear import norm_gate_up, norm_gate_up_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import (
    factor,
    gated_products,
    is_normed,
    refuse_product,
    refuse_vector,
)


def replacement(x: Tensor, norm: Tensor, w: Tensor, eps: float) -> Tensor:
    out: Tensor = norm_gate_up(x, norm, w, eps)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    operands = (context.empty(5, 24), context.empty(24), context.empty(40, 24))
    return [Case(operands, {"eps": eps}) for eps in context.eps]


def check(operands: Operands) -> str | None:
    x = operands["x"]
    return refuse_product(x, operands["w"]) or refuse_vector("norm", operands["norm"], x)


def expected(graph: fx.Graph) -> int:
    """Gated products of normed rows that nothing else reads."""
    rows = (factor(product) for product in gated_products(graph))
    return sum(is_normed(each) and len(each.users) == 1 for each in rows)


PASS = Rewrite(
    name="norm_gate_up",
    pattern=norm_gate_up_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    given=("norm", "w"),
    expected=expected,
)
