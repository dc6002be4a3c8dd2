"""Which tiles are tried for linear layers, and what a table keeps of the times."""

from __future__ import annotations

import pytest
import torch

from tokenspeed.kernels.linear import kind_of
from tokenspeed.kernels.linear_tiles import Algorithm, Choice, Site, Tile
from tokenspeed.kernels.linear_tuning import TOKENS, _merged, candidates, make_call

KINDS = ["norm_linear", "linear_add", "norm_gate_up", "gate_up", "linear"]
LT = Algorithm("00" * 64, 1)
A, B = Tile("gemv", 1, 4, 512), Tile("gemv", 2, 4, 512)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [256, 1024, 3072, 4096, 12288])
def test_candidates_can_be_launched(kind: str, size: int) -> None:
    for num_tokens in TOKENS:
        tiles = list(candidates(Site(kind, 4096, size, "bfloat16"), num_tokens))
        assert len(tiles) == len(set(tiles)) <= 100
        assert all(tile.problem() is None for tile in tiles)
        kernels = {tile.kernel for tile in tiles}
        has_gated = kind == "gate_up" and num_tokens >= 128
        assert ("gated" in kernels) == has_gated
        assert kernels - {"gated"} <= ({"gemv"} if num_tokens == 1 else {"gemv", "skinny"})
        assert bool(tiles) <= (num_tokens <= 256 or has_gated)
        if kind.startswith("norm"):
            assert all(tile.size >= size for tile in tiles if tile.kernel == "gemv")


def test_float32_has_no_matrix_unit() -> None:
    assert not list(candidates(Site("linear_add", 4096, 1024, "float32"), 8))


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_is_of_its_site(kind: str) -> None:
    call = make_call(Site(kind, 12, 8, "float32"), torch.ones(12, 8), 3)
    call.check(kind)
    assert kind_of(call) == kind and call.x.shape == (3, 8)


def test_neighbours_with_one_winner_are_one_choice() -> None:
    winners = [Choice(1, A), Choice(2, B), Choice(4, B), Choice(8, None), Choice(16, A)]
    assert _merged(winners) == (Choice(1, A), Choice(4, B), Choice(8, None), Choice(16, A))
    assert _merged([Choice(1, A), Choice(2, None), Choice(4, None)]) == (Choice(1, A),)
    assert _merged([Choice(1, None)]) == ()
    assert _merged([Choice(1, A), Choice(8, LT)]) == (Choice(1, A), Choice(1 << 16, LT))
    gated = Tile("gated", rows=64, warps=8, size=64, tokens=128)
    assert _merged([Choice(1, None), Choice(8, gated)]) == (
        Choice(1, None),
        Choice(1 << 16, gated),
    )
