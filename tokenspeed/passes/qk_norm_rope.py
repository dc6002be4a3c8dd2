"""Fuse the RMSNorm of each head with the rotation after it.

Before: rms norm -> rotation        After: qk_norm_rope
Why: a head is read and written once instead of twice. Has to run before `rope` and `rms_norm`.
Silent where either part would be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenspeed.kernels.qk_norm_rope import qk_norm_rope, qk_norm_rope_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.rope import angles
from tokenspeed.passes.shapes import (
    is_normed,
    refuse_angles,
    refuse_rows,
    refuse_vector,
    rotations,
)


def replacement(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    out: Tensor = qk_norm_rope(x, weight, cos, sin, eps)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    """A head turned as a whole, and one with a rest."""
    return [
        Case((context.empty(5, 3, size), context.empty(size), *angles(context)), {"eps": eps})
        for eps in context.eps
        for size in (12, 16)
    ]


def check(operands: Operands) -> str | None:
    x = operands["x"]
    return (
        refuse_rows("x", x)
        or refuse_vector("weight", operands["weight"], x)
        or refuse_angles(operands["cos"], operands["sin"], x)
    )


PASS = Rewrite(
    name="qk_norm_rope",
    pattern=qk_norm_rope_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=lambda graph: sum(is_normed(turned) for turned in rotations(graph)),
)
