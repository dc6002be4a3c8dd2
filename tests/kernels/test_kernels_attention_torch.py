"""Paged attention against the plain reference: any mix of chunks and decodes, any pages."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tokenspeed.kernels import attention_torch
from tokenspeed.kernels.attend import reference
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import FullAttention, cache_groups

CPU = torch.device("cpu")
SPECS = (
    FullAttention(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3),
    FullAttention(num_heads=4, num_kv_heads=4, head_dim=16, scale=0.2),
)
WINDOWED = FullAttention(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3, window=7)
LAYERS = [SPECS[0], SPECS[1], SPECS[0], WINDOWED, replace(WINDOWED, window=1)]  # four groups
GROUPS = cache_groups(list(LAYERS))
BLOCK = 4
NUM_PAGES = 64


@dataclass
class Sequence:
    """A whole sequence: its tensors by layer, its page tables by group, and how far it has come."""

    qkv: list[tuple[Tensor, Tensor, Tensor]]
    pages: list[Tensor]
    done: int = 0


class Trial:
    """Sequences in one pool, stepped in any mix; every result is checked against the reference."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        tolerance: float = 2e-6,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.scales = (
            None if kv_dtype is None else [(0.3, 0.7), (1.0, 1.0), (0.02, 2.5)] + [(0.3, 0.7)] * 2
        )
        self.pool = PagePool(GROUPS, NUM_PAGES, BLOCK, kv_dtype or dtype, CPU, self.scales)
        self.attention = TorchAttention(GROUPS, self.pool, dtype)
        self.dtype, self.tolerance = dtype, tolerance

    def sequence(self, length: int, pages: list[list[int]]) -> Sequence:
        qkv = []
        for spec in LAYERS:
            heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
            q, k, v = (torch.randn(length, n, spec.head_dim).to(self.dtype) for n in heads)
            qkv.append((q, k, v))
        return Sequence(qkv, [torch.tensor(table) for table in pages * 2])

    def step(self, rows: list[tuple[Sequence, int]]) -> list[Tensor]:
        """Run the next n tokens of each sequence; check and return each layer's result."""
        starts, lengths = [0], []
        for sequence, n in rows:
            starts.append(starts[-1] + n)
            lengths.append(sequence.done + n)
        tables = [[sequence.pages[group] for sequence, _ in rows] for group in range(len(GROUPS))]
        self.attention.plan(AttentionStep(starts, lengths, tables))
        outs = []
        for layer, spec in enumerate(LAYERS):
            parts = [
                [x[sequence.done : sequence.done + n] for x in sequence.qkv[layer]]
                for sequence, n in rows
            ]
            q, k, v = (torch.cat(part) for part in zip(*parts, strict=True))
            out = self.attention.attend(q, k, v, layer, None)
            assert out.shape == q.shape and out.dtype == q.dtype
            for (sequence, n), begin in zip(rows, starts, strict=False):
                q, k, v = (x[: sequence.done + n] for x in sequence.qkv[layer])
                want = reference(q, *self.as_read(k, v, layer), spec.scale, spec.window)
                got = out[begin : begin + n]
                assert torch.allclose(got, want[-n:], rtol=0, atol=self.tolerance), (layer, n)
            outs.append(out)
        for sequence, n in rows:
            sequence.done += n
        return outs

    def as_read(self, k: Tensor, v: Tensor, layer: int) -> list[Tensor]:
        """What the cache makes of a layer's keys and values."""
        if self.scales is None:
            return [k, v]
        limit = torch.finfo(self.pool.keys[0].dtype).max
        return [
            (x * (1 / scale)).clamp(-limit, limit).to(self.pool.keys[0].dtype).float() * scale
            for x, scale in zip((k, v), self.scales[layer], strict=True)
        ]


def tables(num_pages: int, first: int = 0) -> list[list[int]]:
    """Consecutive pages in the first group, scattered ones in the second."""
    pages = list(range(first, first + num_pages))
    return [pages, pages[::-1]]


@pytest.mark.parametrize("chunks", [[40], [1] * 20, [7, 7, 7, 1, 1, 9], [3, 4, 5, 28], [39, 1]])
@pytest.mark.parametrize("first", [0, 5])
def test_one_sequence_in_chunks(chunks: list[int], first: int) -> None:
    trial = Trial()
    sequence = trial.sequence(sum(chunks), tables(10, first))
    for n in chunks:
        trial.step([(sequence, n)])


def test_a_chunk_longer_than_a_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_torch, "_TILE", 8)
    trial = Trial()
    sequence = trial.sequence(60, tables(15))
    for n in (5, 30, 8, 17):
        trial.step([(sequence, n)])


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_mix_of_rows(data: st.DataObject) -> None:
    kv_dtypes = [None, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16]
    trial = Trial(kv_dtype=data.draw(st.sampled_from(kv_dtypes)), tolerance=4e-6)
    order = data.draw(st.permutations(range(NUM_PAGES)))
    sequences = []
    for i in range(data.draw(st.integers(1, 4))):
        own = order[i * 8 : i * 8 + 8]
        if data.draw(st.booleans()):
            own = sorted(own)
        sequences.append(trial.sequence(8 * BLOCK, [own, order[32 + i * 8 : 40 + i * 8]]))
    for _ in range(data.draw(st.integers(1, 6))):
        rows = []
        for sequence in data.draw(st.permutations(sequences)):
            left = 8 * BLOCK - sequence.done
            n = data.draw(st.integers(0, min(left, 12)) | st.just(min(left, 1)))
            rows += [(sequence, n)] if n else []
        if rows:
            trial.step(rows)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_a_row_gives_the_same_bits_in_any_batch(kv_dtype: torch.dtype | None) -> None:
    def last_token(neighbours: list[int]) -> list[Tensor]:
        torch.manual_seed(1)
        trial = Trial(kv_dtype=kv_dtype)
        own = trial.sequence(30, tables(8))
        others = [trial.sequence(40, tables(10, 8 + 10 * i)) for i in range(len(neighbours))]
        trial.step([(own, 12)])
        trial.step([(own, 17)] + [(o, n) for o, n in zip(others, neighbours, strict=True)])
        rows = [(own, 1)] + [(o, 1) for o in others]
        return [out[0] for out in trial.step(rows)]

    alone = last_token([])
    for neighbours in ([1], [20, 7, 1]):
        assert all(map(torch.equal, last_token(neighbours), alone))


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
def test_place_of_pages_does_not_change_a_bit(kv_dtype: torch.dtype | None) -> None:
    outs = []
    for table in ([0, 1, 2, 3], [9, 3, 50, 7]):
        torch.manual_seed(2)
        trial = Trial(kv_dtype=kv_dtype)
        sequence = trial.sequence(16, [table, table])
        outs.append([trial.step([(sequence, n)]) for n in (6, 9, 1)])
    for a, b in zip(*outs, strict=True):
        assert all(map(torch.equal, a, b))


def test_a_shared_prefix_is_read_and_not_written() -> None:
    trial = Trial()
    first = trial.sequence(12, tables(3))
    trial.step([(first, 12)])
    before = [keys[:2].clone() for keys in trial.pool.keys]
    second = trial.sequence(20, [[0, 1, 10, 11, 12], [2, 1, 20, 21, 22]])
    for mine, theirs in zip(second.qkv, first.qkv, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            a[:8] = b[:8]
    second.done = 8
    trial.step([(second, 5)])
    trial.step([(second, 1)])
    assert torch.equal(trial.pool.keys[0][:2], before[0])


def test_table_may_be_longer_than_the_context() -> None:
    trial = Trial()
    sequence = trial.sequence(6, [[3, 4, 60, 61], [9, 2, 0, 0]])
    trial.step([(sequence, 5)])
    trial.step([(sequence, 1)])
    assert not trial.pool.keys[0][60].any() and not trial.pool.keys[1][0].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    trial = Trial(dtype, tolerance=0.03)
    a, b = trial.sequence(40, tables(10)), trial.sequence(40, tables(10, 20))
    for n, m in ((12, 1), (1, 20), (9, 7), (1, 1)):
        trial.step([(a, n), (b, m)])


@pytest.mark.parametrize(
    ("starts", "lengths", "pages"),
    [([0, 0], [3], 1), ([0, 5], [4], 1), ([0, 1], [5], 1), ([0, 2, 1], [2, 2], 1)],
)
def test_an_impossible_step_is_refused(starts: list[int], lengths: list[int], pages: int) -> None:
    tables = [[torch.arange(pages)] * len(lengths)] * len(GROUPS)
    with pytest.raises(AssertionError, match="query tokens of"):
        Trial().attention.plan(AttentionStep(starts, lengths, tables))


def test_sinks_are_refused() -> None:
    trial = Trial()
    q, k = torch.zeros(1, 6, 8), torch.zeros(1, 2, 8)
    with pytest.raises(AssertionError, match="does not support sinks"):
        trial.attention.attend(q, k, k, 0, torch.zeros(6))
