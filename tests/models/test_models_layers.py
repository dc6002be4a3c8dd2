"""The shared layers against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from tokenspeed.models.layers import MergedLinear, RMSNorm, RotaryEmbedding, rotate
from tokenspeed.models.rope import Rope


def test_rms_norm_is_computed_in_float32() -> None:
    norm = RMSNorm(4, eps=1e-6)
    x = torch.tensor([[3e4, -3e4, 1e4, 2e4]], dtype=torch.float16)  # the squares overflow float16
    expected = x.float() / x.float().square().mean(-1, keepdim=True).sqrt()
    out = norm.half()(x)
    assert out.dtype == torch.float16
    assert torch.allclose(out.float(), expected, atol=1e-3)


def test_merged_linear_is_its_parts() -> None:
    merged, x = MergedLinear(5, [2, 3, 1], bias=True), torch.randn(4, 5)
    weights, biases = merged.weight.split([2, 3, 1]), merged.bias.split([2, 3, 1])
    for out, weight, bias in zip(merged(x), weights, biases, strict=True):
        assert torch.allclose(out, x @ weight.T + bias, atol=1e-6)


@pytest.mark.parametrize("head_dim", [4, 6, 10])
def test_rotation_turns_pairs_and_leaves_the_rest(head_dim: int) -> None:
    """Pair i is (i, i + 2): as a complex number it is multiplied by exp(i * position * freq)."""
    rotary = RotaryEmbedding(Rope((1.0, 0.25), scale=2.0))
    rotary.fill()
    x, positions = torch.randn(3, 2, head_dim), torch.tensor([0, 5, 1000])
    out = rotate(x, *rotary(positions))
    angles = positions[:, None, None] * torch.tensor([1.0, 0.25])
    pairs = torch.complex(x[..., :2], x[..., 2:4]) * torch.polar(torch.tensor(2.0), angles)
    assert torch.allclose(out, torch.cat((pairs.real, pairs.imag, x[..., 4:]), -1), atol=1e-3)
    assert torch.equal(out[..., 4:], x[..., 4:])


def test_angles_stay_float32_in_a_narrow_model() -> None:
    """In bfloat16, position 257 would be 256."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        rotary = RotaryEmbedding(Rope((1.0,)))
    finally:
        torch.set_default_dtype(torch.float32)
    rotary.fill()
    cos, _ = rotary(torch.tensor([257]))
    assert cos.item() == pytest.approx(math.cos(257.0), abs=1e-6)
    x = torch.ones(1, 1, 2, dtype=torch.bfloat16)
    assert rotate(x, *rotary(torch.tensor([257]))).dtype == torch.bfloat16
