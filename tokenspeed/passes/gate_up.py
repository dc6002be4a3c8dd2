"""Fuse a SwiGLU MLP's merged projection with its gate, for steps of all sizes.

Before: mm(x, permute(w)) -> split -> silu(gate) * up        After: gate_up
Why: of a prompt, the product is as large as all other rows of a layer together, and is written to
be read once. In the product's epilogue the gate costs nothing. Has to run after `norm_gate_up`,
which takes the norm as well where tokens are few, and before `linear` and `silu_mul`, which would
take the parts. Silent where they must be.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.linear import gate_up, gate_up_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import gated_products, refuse_product


def replacement(x: Tensor, w: Tensor) -> Tensor:
    out: Tensor = gate_up(x, w)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    return [Case((context.empty(5, 24), context.empty(40, 24)))]


def check(operands: Operands) -> str | None:
    return refuse_product(operands["x"], operands["w"])


def expected(graph: fx.Graph) -> int:
    return sum(1 for _ in gated_products(graph))


PASS = Rewrite(
    name="gate_up",
    pattern=gate_up_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    given=("w",),
    expected=expected,
)
