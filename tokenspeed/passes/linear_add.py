"""Fuse a linear layer with the residual that it is added to.

Before: mm(x, permute(w)) -> residual + it        After: linear_add
Why: one kernel less, and the product stays in registers. Has to run before `add_rms_norm`, which
would take the sum, and before Inductor folds it into the product. Silent where the product is used
elsewhere, where the residual is broadcast, and for a residual on the right: models write it first.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, fx

from tokenspeed.kernels.linear import linear_add, linear_add_reference
from tokenspeed.passes.rewrite import Case, Operands, PassContext, Rewrite
from tokenspeed.passes.shapes import aten, calls, products, refuse_product, refuse_rows
from tokenspeed.passes.torch_api import is_same


def replacement(x: Tensor, w: Tensor, residual: Tensor, bias: Tensor | None = None) -> Tensor:
    out: Tensor = linear_add(x, w, residual, bias)
    return out


def cases(context: PassContext) -> Sequence[Case]:
    operands = (context.empty(5, 24), context.empty(40, 24), context.empty(5, 40))
    return [Case(operands), Case((*operands, context.empty(40)))]


def check(operands: Operands) -> str | None:
    x, w, residual = operands["x"], operands["w"], operands["residual"]
    if reason := refuse_product(x, w, operands.get("bias")) or refuse_rows("residual", residual):
        return reason
    if residual.dtype != x.dtype:
        return f"the residual is {residual.dtype}, x {x.dtype}"
    sizes = (x.shape[0], w.shape[0])
    same = residual.dim() == 2 and all(map(is_same, residual.shape, sizes))
    return None if same else f"the residual is {list(residual.shape)}, the product {list(sizes)}"


def expected(graph: fx.Graph) -> int:
    """Sums of a tensor and a product that nothing else reads."""
    found = 0
    for product in products(graph):
        (user, *others) = product.users
        is_sum = not others and calls(user, aten.add.Tensor) and user.args[1] is product
        found += is_sum and isinstance(user.args[0], fx.Node)
    return found


PASS = Rewrite(
    name="linear_add",
    pattern=linear_add_reference,
    replacement=replacement,
    cases=cases,
    check=check,
    given=("w", "bias"),
    expected=expected,
)
