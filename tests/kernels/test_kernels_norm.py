"""`rms_norm` and `add_rms_norm`: formulas, schema and fakes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.rms_norm import add_rms_norm, rms_norm


def test_rms_norm_by_hand() -> None:
    x, weight = torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0])
    # The mean of squares is 12.5, and with epsilon 0.5 its root the root of 13.
    assert torch.allclose(rms_norm(x, weight, 0.5), torch.tensor([[3.0, 8.0]]) / 13.0**0.5)


def test_add_rms_norm_gives_the_norm_of_the_sum_and_the_sum() -> None:
    x, residual, weight = torch.randn(3, 5), torch.randn(3, 5), torch.randn(5)
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_squares_are_of_float32(dtype: torch.dtype) -> None:
    x = torch.full((1, 4), 1000.0, dtype=dtype)  # 1e6 is no float16
    assert torch.allclose(rms_norm(x, torch.ones(4, dtype=dtype), 0.0), torch.ones(1, 4).to(dtype))


@pytest.mark.parametrize("shape", [(3, 8), (3, 2, 8), (0, 8)])
def test_schemas_and_fakes(shape: tuple[int, ...]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = torch.randn(shape).to(dtype), torch.randn(8).to(dtype)
        torch.library.opcheck(rms_norm, (x, weight, 1e-6))
        torch.library.opcheck(add_rms_norm, (x, x.clone(), weight, 1e-6))
