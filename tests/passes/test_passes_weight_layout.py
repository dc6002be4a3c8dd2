"""The weight layout pass: products with a float32 weight become `linear`, others stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tokenspeed.kernels.linear import linear
from tokenspeed.passes.weight_layout import PASS

aten = torch.ops.aten


def ran(function: Callable[..., Tensor], *inputs: Tensor) -> tuple[int, int, int]:
    """(expected, changed, calls of `linear`), after a check that the results are the same."""
    module = make_fx(function, tracing_mode="fake")(*inputs)
    graph: fx.Graph = module.graph
    before = module(*inputs)
    assert PASS.expected is not None
    expected, changed = PASS.expected(graph), PASS.run(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    assert torch.equal(module(*inputs), before)
    nodes = graph.find_nodes(op="call_function", target=linear)
    assert all(isinstance(node.meta["val"], Tensor) for node in nodes)
    return expected, changed, len(nodes)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = ((5, 48), (64, 48), (64,))
    x, w, bias = (torch.randn(size, dtype=dtype) for size in sizes)
    return x, w, bias


def test_a_product_with_a_weight() -> None:
    x, w, _ = inputs()
    assert ran(lambda x, w: aten.mm(x, aten.permute(w, [1, 0])), x, w) == (1, 1, 1)
    assert ran(lambda x, w: aten.mm(x, aten.t(w)) + 1, x, w) == (1, 1, 1)


def test_a_weight_used_twice() -> None:
    x, w, _ = inputs()

    def twice(x: Tensor, w: Tensor) -> Tensor:
        transposed = aten.permute(w, [1, 0])
        return aten.mm(x, transposed) + aten.mm(x * 2, transposed)

    assert ran(twice, x, w) == (2, 2, 2)


def test_a_bias_goes_along() -> None:
    x, w, bias = inputs()
    product = lambda x, w, bias: aten.addmm(bias, x, aten.permute(w, [1, 0]))  # noqa: E731
    assert ran(product, x, w, bias) == (1, 1, 1)


def test_a_residual_or_a_scale_stays_and_is_missed() -> None:
    x, w, _ = inputs()
    residual = torch.randn(5, 64)

    def scaled(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
        return aten.addmm(bias, x, aten.permute(w, [1, 0]), beta=2.0)

    assert ran(lambda r, x, w: aten.addmm(r, x, aten.t(w)), residual, x, w) == (1, 0, 0)
    assert ran(scaled, *inputs()) == (1, 0, 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: aten.mm(x, aten.permute(w * 1.5, [1, 0])),  # computed
        lambda x, w: aten.mm(w, aten.permute(w, [0, 1]).view(48, 64)),  # not transposed
        lambda x, w: aten.mm(x, w.view(48, 64)),  # [size, rows]
    ],
)
def test_other_products_stay(function: Callable[..., Tensor]) -> None:
    x, w, _ = inputs()
    assert ran(function, x, w) == (0, 0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_stay(dtype: torch.dtype) -> None:
    x, w, _ = inputs(dtype)
    assert ran(lambda x, w: aten.mm(x, aten.t(w)), x, w) == (0, 0, 0)


def test_a_weight_with_strides_stays() -> None:
    x, _, _ = inputs()
    w = torch.randn(48, 64).t()
    assert ran(lambda x, w: aten.mm(x, aten.t(w)), x, w) == (0, 0, 0)
