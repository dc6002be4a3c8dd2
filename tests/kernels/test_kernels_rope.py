"""`rope` and `qk_norm_rope`: formulas, schemas and fakes."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.qk_norm_rope import qk_norm_rope, rope
from tokenspeed.kernels.rms_norm import rms_norm
from tokenspeed.kernels.rope_angles import rope_angles


@pytest.mark.parametrize("size", [4, 7])
def test_rope_multiplies_complex_numbers_and_leaves_the_rest(size: int) -> None:
    x, angles = torch.randn(3, 2, size), torch.randn(3, 1, 2)
    out = rope(x, angles.cos(), angles.sin())
    turned = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.ones(()), angles)
    assert torch.allclose(out, torch.cat((turned.real, turned.imag, x[..., 4:]), -1), atol=1e-6)


def test_qk_norm_rope_is_a_norm_and_then_rope() -> None:
    x, weight, angles = torch.randn(3, 2, 4), torch.randn(4), torch.randn(3, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    want = rope(rms_norm(x, weight, 1e-6), cos, sin)
    assert torch.equal(qk_norm_rope(x, weight, cos, sin, 1e-6), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [4, 7])
def test_schemas_and_fakes(size: int, dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 2, size).to(dtype), torch.randn(size).to(dtype)
    cos, sin = torch.randn(3, 1, 2), torch.randn(3, 1, 2)
    torch.library.opcheck(rope, (x, cos, sin))
    torch.library.opcheck(qk_norm_rope, (x, weight, cos, sin, 1e-6))


def test_angles_are_products_and_scaled() -> None:
    positions, inv_freq = torch.tensor([0, 3, 70000]), torch.tensor([1.0, 0.25])
    cos, sin = rope_angles(positions, inv_freq, 1.5)
    angles = (positions[:, None].double() * inv_freq.double())[:, None]
    assert torch.allclose(cos.double(), 1.5 * angles.cos(), atol=1e-6)
    assert torch.allclose(sin.double(), 1.5 * angles.sin(), atol=1e-6)


@pytest.mark.parametrize("scale", [1.0, 1.5])
@pytest.mark.parametrize("tokens", [0, 3])
def test_schema_and_fake_of_angles(tokens: int, scale: float) -> None:
    torch.library.opcheck(rope_angles, (torch.arange(tokens), torch.rand(2), scale))
