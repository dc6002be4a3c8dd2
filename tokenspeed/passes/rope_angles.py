"""Compute the angles of rotary positions in one kernel.

Before: cast -> unsqueeze -> mul inv_freq -> cos (-> mul scale), sin (-> mul scale)
After:  rope_angles
Why: it is all that Inductor would have to compile of many models. Silent where positions or
frequencies are no vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tokenspeed.kernels.rope_angles import reference, rope_angles
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import angles


def replacement(positions: Tensor, inv_freq: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    cos, sin = rope_angles(positions, inv_freq, scale)
    return cos, sin


def cases(context: PassContext) -> Sequence[Case]:
    positions = context.empty(5, dtype=torch.int64)
    operands = (positions, context.empty(12, dtype=torch.float32))
    return [Case(operands, {"scale": scale}) for scale in context.scales]


def check(operands: Operands) -> str | None:
    positions, inv_freq = operands["positions"], operands["inv_freq"]
    for name, each in (("positions", positions), ("inv_freq", inv_freq)):
        if not isinstance(each, Tensor) or each.dim() != 1 or each.stride(0) != 1:
            return f"{name} is no dense vector"
    if positions.is_floating_point() or inv_freq.dtype != torch.float32:
        return f"positions is {positions.dtype}, inv_freq {inv_freq.dtype}"
    return None


PASS = Rewrite(
    name="rope_angles",
    pattern=reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=lambda graph: sum(1 for _ in angles(graph)),
)
