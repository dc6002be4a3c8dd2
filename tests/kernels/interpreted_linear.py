"""Kernels of linear layers against their references, in Triton's interpreter: run by
test_kernels_linear.py in a process of its own, with TRITON_INTERPRET=1.

Its matrix product takes bfloat16 for integers, so that dtype is for `gemv` alone.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels import skinny
from tokenspeed.kernels.linear import launch, reference
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Tile

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")
"""From the interpreter's loops."""

WHOLE = Tile("gemv", rows=2, warps=1, size=64, repeats=3)
CHUNKS = Tile("gemv", rows=2, warps=1, size=16)
GEMVS = pytest.mark.parametrize("tile", [WHOLE, CHUNKS], ids=["whole", "chunks"])
SKINNY = Tile("skinny", rows=16, warps=1, size=16, tokens=16)
SPLIT = Tile("skinny", rows=16, warps=1, size=16, tokens=16, splits=3)
SKINNIES = pytest.mark.parametrize("tile", [SKINNY, SPLIT], ids=["skinny", "split"])
SIZES = pytest.mark.parametrize(("num_rows", "size"), [(16, 64), (19, 37)])
OPS = ["linear", "bias", "norm_linear", "linear_add", "norm_gate_up", "gate_up"]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2**-5}


def draw(*shape: int, dtype: torch.dtype) -> Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(shape).to(dtype)


def call_of(name: str, num_tokens: int, num_rows: int, size: int, dtype: torch.dtype) -> LinearCall:
    """x and the residual are columns of wider tensors."""
    x = draw(num_tokens, size + 3, dtype=dtype)[:, 3:]
    w = draw(2 * num_rows if "gate" in name else num_rows, size, dtype=dtype) / size**0.5
    call = LinearCall(x, w.contiguous())
    if name.startswith("norm"):
        call = replace(call, norm=draw(size, dtype=dtype), eps=1e-5)
    if "gate" in name:
        return replace(call, gate=True)
    if name == "linear_add":
        call = replace(call, residual=draw(num_tokens, num_rows + 1, dtype=dtype)[:, 1:])
    return replace(call, bias=draw(num_rows, dtype=dtype)) if name == "bias" else call


def assert_right(call: LinearCall, tile: Tile) -> None:
    call.check("a case")
    got, want = launch(call, tile), reference(call)
    assert got.dtype == want.dtype and got.shape == want.shape and got.is_contiguous()
    tolerance = TOLERANCE[got.dtype]
    assert torch.allclose(got.float(), want.float(), rtol=tolerance, atol=2 * tolerance)


@GEMVS
@SIZES
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", OPS)
def test_few_tokens(name: str, dtype: torch.dtype, num_rows: int, size: int, tile: Tile) -> None:
    if tile is CHUNKS and name.startswith("norm"):
        with pytest.raises(AssertionError, match="by chunks"):
            launch(call_of(name, 1, num_rows, size, dtype), tile)
        return
    for num_tokens in (1, 3):
        assert_right(call_of(name, num_tokens, num_rows, size, dtype), tile)


@SKINNIES
@SIZES
@pytest.mark.parametrize("name", OPS)
def test_several_tokens(name: str, num_rows: int, size: int, tile: Tile) -> None:
    for num_tokens in (1, 3, 17):
        assert_right(call_of(name, num_tokens, num_rows, size, torch.float32), tile)


@SKINNIES
@pytest.mark.parametrize("name", ["norm_linear", "norm_gate_up", "linear_add"])
def test_rounding_to_half(name: str, tile: Tile) -> None:
    assert_right(call_of(name, 5, 16, 48, torch.float16), tile)


def test_counts_of_arrivals_go_back_to_zero() -> None:
    call = call_of("linear_add", 17, 19, 64, torch.float32)
    first = launch(call, SPLIT)
    (arrived,) = skinny._arrivals.values()
    assert not arrived.any()
    assert torch.equal(first, launch(call, SPLIT))


def test_more_splits_than_columns() -> None:
    assert_right(call_of("linear", 2, 16, 32, torch.float32), replace_splits(64))


def replace_splits(splits: int) -> Tile:
    return Tile("skinny", rows=16, warps=1, size=16, tokens=16, splits=splits)


def test_squares_are_of_float32() -> None:
    x = torch.full((1, 16), 1000.0, dtype=torch.float16)
    ones = torch.ones(16, dtype=torch.float16)
    call = LinearCall(x, torch.eye(16, dtype=torch.float16), norm=ones, eps=0.0)
    for tile in (WHOLE, SKINNY):
        assert torch.equal(launch(call, tile), torch.ones_like(x))
