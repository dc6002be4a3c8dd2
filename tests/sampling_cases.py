"""Rows to sample, for tests of the kernels in the interpreter and on a GPU, and what agreement with
the reference means: another token is right only where rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels import sample_rows
from tokenspeed.kernels.noise import gumbel, row_keys
from tokenspeed.kernels.sample_rows import OK, RowParams
from tokenspeed.kernels.truncation import cut

KINDS: tuple[dict[str, float], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 2.0, "top_p": 0.2},
    {"temperature": 1e-5, "top_p": 0.99},
)

_ROUNDING = 3e-5
"""Of sums of 150,000 float32 numbers, in whatever order."""


class Rows(NamedTuple):
    logits: Tensor
    positions: Tensor
    params: RowParams

    def only(self, i: int) -> Rows:
        own = slice(i, i + 1)
        params = RowParams(*(each[own].clone() for each in self.params))
        return Rows(self.logits[own].clone(), self.positions[own].clone(), params)


def params_of(asked: Sequence[dict[str, Any]], device: torch.device | None = None) -> RowParams:
    """Row i has seed i unless it asks for another."""

    def column(name: str, default: float, dtype: torch.dtype) -> Tensor:
        values = [each.get(name, default) for each in asked]
        return torch.tensor(values, dtype=dtype, device=device)

    min_p = [each.get("min_p", 0.0) for each in asked]
    logs = [math.log(each) if each else -math.inf for each in min_p]
    seeds = torch.tensor([each.get("seed", i) for i, each in enumerate(asked)], dtype=torch.int64)
    return RowParams(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        log_min_p=torch.tensor(logs, dtype=torch.float32, device=device),
        seeds=seeds.to(device or "cpu"),
        samples=column("sample_index", 0, torch.int64),
    )


def draw_rows(
    count: int,
    vocab_size: int,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    spread: float = 3.0,
    device: torch.device | None = None,
) -> Rows:
    """Rows of every kind, one after another, with top-k as far as the vocabulary goes."""
    torch.manual_seed(seed)
    logits = (spread * torch.randn(count, vocab_size)).to(device or "cpu", dtype)
    positions = torch.randint(0, 1 << 17, (count,)).to(device or "cpu")
    asked = [dict(KINDS[i % len(KINDS)], seed=i // 2) for i in range(count)]
    for each in asked:
        if each.get("top_k", 0) >= vocab_size:
            del each["top_k"]
    return Rows(logits, positions, params_of(asked, device))


def launch(rows: Rows, bans: bool = False) -> tuple[Tensor, Tensor]:
    return sample_rows.launch(rows.logits, rows.positions, *rows.params, bans=bans, greedy=False)


def agree(got: tuple[Tensor, Tensor], rows: Rows, bans: bool = False) -> None:
    """Assert the reference's statuses, and its tokens but for rounding."""
    want = sample_rows.reference(rows.logits, rows.positions, *rows.params, bans=bans, greedy=False)
    assert torch.equal(got[1], want[1])
    for i in ((got[0] != want[0]) & (want[1] == OK)).nonzero()[:, 0].tolist():
        assert rows.params.temperature[i] > 0, f"greedy row {i}: {got[0][i]}, not {want[0][i]}"
        assert_near_tie(rows.only(i), int(got[0][i]), int(want[0][i]))


def assert_near_tie(row: Rows, got: int, want: int) -> None:
    """Two noisy scores are as good as equal, or a cut falls between tokens by rounding alone."""
    logits, params = row.logits.float(), row.params
    scores = (logits - logits.max()) / params.temperature
    noisy = scores + gumbel(row_keys(params.seeds, params.samples, row.positions), logits.shape[1])
    if abs(float(noisy[0, got] - noisy[0, want])) < _ROUNDING:
        return
    kept = []
    for factor in (1 - _ROUNDING, 1 + _ROUNDING):
        moved = scores.clone()
        cut(moved, params.top_k, params.top_p * factor, params.log_min_p + math.log(factor))
        kept.append(bool(moved[0, got].isfinite()) + 2 * bool(moved[0, want].isfinite()))
    assert kept[0] != kept[1], f"{got}, not {want}, with {params}"


def assert_scores(
    got: tuple[Tensor, Tensor, Tensor], want: tuple[Tensor, Tensor, Tensor], logits: Tensor
) -> None:
    """The same numbers; and ids that have them, each once, for ids of equal logits may differ."""
    (chosen, ids, top), (their_chosen, their_ids, their_top) = got, want
    assert ids.shape == their_ids.shape and ids.dtype == torch.int64
    torch.testing.assert_close(chosen, their_chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(top, their_top, rtol=1e-5, atol=1e-5)
    assert torch.equal(logits.gather(1, ids), logits.gather(1, their_ids))
    assert all(len(set(row)) == len(row) for row in ids.tolist())
