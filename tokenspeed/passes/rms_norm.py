"""Fuse an RMSNorm.

Before: pow -> mean -> add eps -> rsqrt -> mul -> mul weight        After: rms_norm
Why: one kernel, whose rows stay in registers. Silent where x and weight differ in dtype (the
product has the wider one then) and where rows are strided.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenspeed.kernels.rms_norm import rms_norm, rms_norm_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import norms, refuse_rows, refuse_vector


def replacement(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out: Tensor = rms_norm(x, weight, eps)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    return [Case((context.empty(5, 24), context.empty(24)), {"eps": eps}) for eps in context.eps]


def check(operands: Operands) -> str | None:
    x = operands["x"]
    return refuse_rows("x", x) or refuse_vector("weight", operands["weight"], x)


PASS = Rewrite(
    name="rms_norm",
    pattern=rms_norm_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=lambda graph: sum(1 for _ in norms(graph)),
)
