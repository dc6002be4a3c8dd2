"""The private torch interfaces that passes need, behind names of their own, as `compile.torch_api`.

torch 2.11 to 2.13. Each function has a test that fails if torch takes its interface away.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true


def is_same(one: object, other: object) -> bool:
    """Are two sizes, numbers or symbols, equal whatever the symbols stand for?"""
    return statically_known_true(one == other)


def returns_views(target: object) -> bool | None:
    """Does an operator's schema say that all it returns are views of its operands? None for what is
    no operator.
    """
    if not isinstance(target, OpOverload):
        return None
    returns = target._schema.returns
    return bool(returns) and all(each.alias_info is not None for each in returns)


def storage_of(tensor: Tensor) -> int:
    """A number that two tensors have in common if they share memory, fake ones too."""
    return int(tensor.untyped_storage()._cdata)


def at_one(size: int | torch.SymInt) -> int:
    """A size with 1 in the place of every symbol."""
    if isinstance(size, int):
        return size
    expression = size.node.expr
    return int(expression.subs(dict.fromkeys(expression.free_symbols, 1)))
