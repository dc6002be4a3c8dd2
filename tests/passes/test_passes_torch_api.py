"""The private torch interfaces that passes use: each fails here if torch takes it away."""

from __future__ import annotations

import operator

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from tokenspeed.passes.torch_api import at_one, is_same, returns_views, storage_of

aten = torch.ops.aten


def test_sizes_are_the_same_if_they_must_be() -> None:
    tokens, other = ShapeEnv().create_unbacked_symint(), ShapeEnv().create_unbacked_symint()
    assert is_same(3, 3) and not is_same(3, 4)
    assert is_same(tokens, tokens) and is_same(2 * tokens, tokens + tokens)
    assert not is_same(tokens, 3) and not is_same(tokens, tokens + 1)
    assert at_one(7) == 7 and at_one(tokens) == 1 and at_one(2 * other + 3) == 5


def test_what_returns_views_says_so() -> None:
    assert returns_views(aten.permute.default) and returns_views(aten.split.Tensor)
    assert returns_views(aten.mm.default) is returns_views(aten._assert_scalar.default) is False
    assert returns_views(operator.getitem) is None


def test_who_shares_memory_has_one_storage() -> None:
    with FakeTensorMode():
        x = torch.empty(4, 6)
        assert storage_of(x) == storage_of(x[1:].t()) != storage_of(x + 1)
