"""Fuse SwiGLU's gate.

Before: split -> (gate, up), silu(gate) * up        After: silu_mul
Why: the merged projection is read once, in place. Silent for other activations, for a gate and an
up that are no two halves of one tensor, and where either is used elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tokenspeed.kernels.silu_mul import reference, silu_mul
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import gates, refuse_rows


def replacement(gate_up: Tensor) -> Tensor:
    out: Tensor = silu_mul(gate_up)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    return [Case((context.empty(5, 24),))]


def check(operands: Operands) -> str | None:
    gate_up = operands["gate_up"]
    if reason := refuse_rows("gate_up", gate_up):
        return reason
    return None if gate_up.dim() == 2 else "gate_up is no [tokens, size]"


PASS = Rewrite(
    name="silu_mul",
    pattern=reference,
    replacement=replacement,
    cases=cases,
    check=check,
    expected=lambda graph: sum(1 for _ in gates(graph)),
)
