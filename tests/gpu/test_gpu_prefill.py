"""Prefill on Hopper against its reference: ragged batches, strided operands, all that lies around
them poisoned.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from tokenspeed.kernels.attend import reference
from tokenspeed.kernels.gluon_jit import runs_gluon
from tokenspeed.kernels.hopper_planned import HopperPrefill

CUDA, BF16, F16 = torch.device("cuda"), torch.bfloat16, torch.float16
SCALE = 1 / math.sqrt(128)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not runs_gluon(CUDA),
        reason="needs a GPU of compute capability 9.0 and a Triton with Gluon as it is used here",
    ),
]

BATCHES = {
    "mixed": [1, 2, 63, 64, 65, 127, 128, 129, 1000, 4099],
    "small": [129, 1, 128, 0, 1, 127, 65, 64, 63, 2, 3, 200, 257],
    "one": [1],
    "full": [1024, 1024],
    "many": [1 + (i * 37) % 300 for i in range(60)],
}
HEADS = [(32, 8), (8, 8), (16, 2), (5, 1)]


class Operands:
    """Views of one tensor that is NaN behind its tokens; results stand before a mark."""

    def __init__(
        self, lengths: list[int], heads: tuple[int, int], dtype: torch.dtype, spread: float = 1.0
    ) -> None:
        total, (num_heads, num_kv_heads) = sum(lengths), heads
        sizes = [num_heads * 128, num_kv_heads * 128, num_kv_heads * 128]
        merged = torch.full((total + 300, sum(sizes)), torch.nan, dtype=dtype, device=CUDA)
        generator = torch.Generator(CUDA).manual_seed(len(lengths))
        numbers = torch.randn(total, sum(sizes), generator=generator, device=CUDA)
        merged[:total] = numbers * spread
        parts = merged[:total].split(sizes, dim=1)
        self.q, self.k, self.v = (part.unflatten(1, (-1, 128)) for part in parts)
        self.room = torch.full((total + 300, num_heads, 128), 7.0, dtype=dtype, device=CUDA)
        self.out, self.beyond = self.room[:total], self.room[total:]
        self.lengths = lengths
        self.prefill = HopperPrefill(CUDA)
        starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
        self.prefill.plan(
            starts, starts, *heads, 128, causal=True, sm_scale=SCALE, q_data_type=dtype
        )

    def run(self, k: Tensor | None = None, v: Tensor | None = None) -> Tensor:
        k, v = self.k if k is None else k, self.v if v is None else v
        self.prefill.run(self.q, k, v, out=self.out)
        return self.out

    def wanted(self) -> Tensor:
        rows = zip(*(each.split(self.lengths) for each in (self.q, self.k, self.v)), strict=True)
        found = [_attended(q, k, v) for q, k, v in rows if len(q)]
        return torch.cat(found)


def _attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By a key head at a time: all scores at once would take too much room."""
    heads = zip(q.chunk(k.shape[1], 1), k.split(1, 1), v.split(1, 1), strict=True)
    return torch.cat([reference(*each, SCALE) for each in heads], dim=1)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_batches(batch: str, heads: tuple[int, int], dtype: torch.dtype) -> None:
    """Scores are greater than usual in one of them: sharp weights, and greatest ones that move."""
    own = Operands(BATCHES[batch], heads, dtype, 3.0 if batch == "many" else 1.0)
    torch.testing.assert_close(own.run(), own.wanted(), rtol=2e-2, atol=2e-2)
    assert (own.beyond == 7).all()
    first = own.room.clone()
    own.run()
    assert torch.equal(own.room, first), "another time, other bits"


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_it_is_as_exact_as_torch(dtype: torch.dtype) -> None:
    own = Operands([3000], (8, 2), dtype)
    exact = _attended(own.q.float(), own.k.float(), own.v.float())
    heads = (each.transpose(0, 1)[None] for each in (own.q, own.k, own.v))
    usual = torch.nn.functional.scaled_dot_product_attention(
        *heads, is_causal=True, scale=SCALE, enable_gqa=True
    )[0].transpose(0, 1)
    assert (own.run() - exact).square().mean() <= 1.1 * (usual - exact).square().mean()


@pytest.mark.parametrize("bad", [1, 3])
def test_neighbours_of_a_row_that_is_not_a_number(bad: int) -> None:
    own = Operands([70, 200, 130, 1, 300], (32, 8), BF16)
    want = own.wanted()
    starts = [0, *itertools.accumulate(own.lengths)]
    rows = slice(starts[bad], starts[bad + 1])
    k, v = own.k.clone(), own.v.clone()
    k[rows], v[rows] = torch.nan, torch.inf
    got = own.run(k, v)
    for each in (slice(0, rows.start), slice(rows.stop, None)):
        torch.testing.assert_close(got[each], want[each], rtol=2e-2, atol=2e-2)


def test_dense_keys_and_heads_apart() -> None:
    """As `kv_store` leaves keys, and queries with something between their heads."""
    own = Operands([300, 1, 129], (6, 2), BF16)
    want = own.run().clone()
    wide = torch.full((430, 6, 256), torch.nan, dtype=BF16, device=CUDA)
    wide[..., :128] = own.q
    own.q = wide[..., :128]
    assert torch.equal(own.run(own.k.contiguous()), want)


def test_nothing_at_all() -> None:
    own = Operands([0, 0], (4, 2), BF16)
    own.run()
    assert (own.beyond == 7).all()


def test_plans_run_ahead_of_the_device() -> None:
    """Each is made before the device has begun with the one in front of it."""
    all_operands = [Operands([300 - 40 * i, 64 * i + 1], (8, 2), BF16) for i in range(6)]
    all_operands[0].run()
    prefill = HopperPrefill(CUDA)
    torch.cuda.synchronize()
    for own in all_operands:
        torch.cuda._sleep(50_000_000)
        starts = torch.tensor([0, *itertools.accumulate(own.lengths)], dtype=torch.int32)
        prefill.plan(starts, starts, 8, 2, 128, causal=True, sm_scale=SCALE, q_data_type=BF16)
        prefill.run(own.q, own.k, own.v, out=own.out)
    for own in all_operands:
        torch.testing.assert_close(own.out, own.wanted(), rtol=2e-2, atol=2e-2)
