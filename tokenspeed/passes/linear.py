"""Give what matrix products are left to the kernel, or the library's algorithm, that is fastest.

Before: mm(x, permute(w, [1, 0]))    addmm(bias, x, permute(w, [1, 0]))
After:  linear(x, w)                 linear(x, w, bias)
Why: with one token the library reads a weight at half the memory's speed if it is small, and at
nine tenths if it is large; with thousands its first guess is up to 6% slower than the best of its
algorithms. Which one serves is a matter of a table (`kernels/linear_tiles.py`) and the real token
count. Has to run after what would fuse a product.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.linear import linear, linear_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import products, refuse_product


def replacement(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = linear(x, w, bias)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    operands = (context.empty(5, 24), context.empty(40, 24))
    return [Case(operands), Case((*operands, context.empty(40)))]


def check(operands: Operands) -> str | None:
    return refuse_product(operands["x"], operands["w"], operands.get("bias"))


def expected(graph: fx.Graph) -> int:
    return sum(1 for _ in products(graph))


PASS = Rewrite(
    name="linear",
    pattern=linear_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    given=("w", "bias"),
    expected=expected,
)
