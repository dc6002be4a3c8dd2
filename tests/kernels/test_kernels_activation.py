"""`silu_mul`: formula, schema and fake."""

from __future__ import annotations

import torch

from tokenspeed.kernels.silu_mul import silu_mul


def test_silu_mul_by_hand() -> None:
    gate_up = torch.tensor([[0.0, 2.0, 5.0, 3.0]])
    assert torch.allclose(
        silu_mul(gate_up), torch.tensor([[0.0, 6.0]]) * torch.tensor(2.0).sigmoid()
    )


def test_schema_and_fake() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in (0, 3):
            torch.library.opcheck(silu_mul, (torch.randn(tokens, 8).to(dtype),))
