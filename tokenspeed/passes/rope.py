"""Fuse the rotation of queries or keys.

Before: two slices, four products, a difference, a sum, cat        After: rope
Why: one kernel that reads a head once. Has to run after `qk_norm_rope`, which takes the norm along.
Silent where the angles are not float32 or not shared by a token's heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.kernels.qk_norm_rope import rope, rope_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import refuse_angles, refuse_rows, rotations


def replacement(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = rope(x, cos, sin)
    return out


def angles(context: PassContext) -> tuple[Tensor, Tensor]:
    cos, sin = (context.empty(5, 1, 6, dtype=torch.float32) for _ in range(2))
    return cos, sin


def cases(context: PassContext) -> Sequence[Case]:
    """A head turned as a whole, and one with a rest."""
    return [Case((context.empty(5, 3, size), *angles(context))) for size in (12, 16)]


def check(operands: Operands) -> str | None:
    x = operands["x"]
    return refuse_rows("x", x) or refuse_angles(operands["cos"], operands["sin"], x)


PASS = Rewrite(
    name="rope",
    pattern=rope_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=lambda graph: sum(1 for _ in rotations(graph)),
)
