"""Sampling kernels against their references, in Triton's interpreter: run by
test_kernels_sampling.py in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import math

import pytest
import torch
from sampling_cases import Rows, agree, assert_scores, draw_rows, launch, params_of
from torch import Tensor

from tokenspeed.kernels import noise, sample_rows, score_rows
from tokenspeed.kernels.sample_rows import NO_TOKEN, NOT_FINITE, OK, RowParams
from tokenspeed.kernels.triton_jit import jit, tl

# Of the interpreter, where a loop's bound was loaded.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts, groups and blocks even in rows of some hundred tokens."""
    monkeypatch.setattr(sample_rows, "_SIZE", 32)
    monkeypatch.setattr(sample_rows, "_GROUPS", 4)
    monkeypatch.setattr(sample_rows, "_ROOM", 16)
    monkeypatch.setattr(sample_rows, "_BLOCK", 64)
    monkeypatch.setattr(score_rows, "_SIZE", 32)
    monkeypatch.setattr(score_rows, "_GROUPS", 4)


@jit
def _noise_kernel(  # type: ignore[no-untyped-def]
    seeds, samples, positions, bits, numbers, V, BLOCK: tl.constexpr
):
    row, i = tl.program_id(0), tl.arange(0, BLOCK)
    key = noise.row_key(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
    own = noise.bits_of(key, i)
    tl.store(bits + row * V + i, own, mask=i < V)
    tl.store(numbers + row * V + i, noise.gumbel_of(own), mask=i < V)


def test_noise_is_that_of_the_reference_bit_for_bit() -> None:
    torch.manual_seed(0)
    count, vocab_size = 7, 300
    seeds = torch.randint(-(2**63), 2**63 - 1, (count,))
    seeds[:2] = torch.tensor([0, 2**63 - 1])
    samples, positions = torch.arange(count), torch.randint(0, 1 << 20, (count,))
    bits = torch.empty(count, vocab_size, dtype=torch.int32)
    numbers = torch.empty(count, vocab_size)
    _noise_kernel[count,](seeds, samples, positions, bits, numbers, vocab_size, BLOCK=512)
    keys = noise.row_keys(seeds, samples, positions)
    assert torch.equal(bits, noise.random_bits(keys, vocab_size))
    torch.testing.assert_close(numbers, noise.gumbel(keys, vocab_size), rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 31, 97])
def test_rows_of_all_kinds(vocab_size: int, dtype: torch.dtype) -> None:
    rows = draw_rows(8, vocab_size, dtype=dtype, seed=vocab_size)
    agree(launch(rows), rows)


CUTS: list[dict[str, float]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 1},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.1},
    {"top_k": 14, "top_p": 0.5},  # more tokens above the bound than are kept
    {"top_k": 20},  # more than there are groups
    {"top_k": 90, "top_p": 0.7, "min_p": 0.01},
]


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_cuts_of_flat_and_peaked_rows(spread: float) -> None:
    """Spread 0: all tokens tie."""
    torch.manual_seed(3)
    asked = [{"temperature": 0.8, **each} for each in CUTS]
    rows = Rows(spread * torch.randn(len(asked), 97), torch.arange(len(asked)), params_of(asked))
    agree(launch(rows), rows)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_k": 3},
        {"top_k": 4, "min_p": 0.85},
        {"top_k": 2, "top_p": 0.7},
        {"top_p": 0.5},
        {"min_p": 0.7},
    ],
    ids=str,
)
def test_many_seeds_of_few_tokens(params: dict[str, float]) -> None:
    """Noise decides, and the likeliest tokens stand in one group: a bound by groups is too low."""
    logits = torch.empty(12, 13)
    logits[:, [12, 8, 4, 0, 9, 5, 1, 10, 6, 2, 11, 7, 3]] = torch.arange(13) / -12
    rows = Rows(logits, torch.arange(12), params_of([{"temperature": 0.8, **params}] * 12))
    agree(launch(rows), rows)


def test_ties_take_the_lowest_id_and_stay_together() -> None:
    logits = torch.full((5, 97), -9.0)
    logits[:, [90, 3, 70]] = 2.0  # in three parts
    asked = [{"temperature": 0.0}] + [{"temperature": 0.01, "top_k": 1}] * 4
    rows = Rows(logits, torch.arange(5), params_of(asked))
    ids, status = launch(rows)
    agree((ids, status), rows)
    assert ids[0] == 3 and len(set(ids[1:].tolist())) > 1


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_faulty_rows_are_told_and_harm_no_other() -> None:
    rows = draw_rows(8, 97, seed=1)
    expected = launch(rows)
    rows.logits[[0, 3, 4, 6], [96, 0, 50, 31]] = torch.tensor([1, 1, -1, math.nan]) * math.inf
    ids, status = launch(rows)
    faulty = [0, 3, 4, 6]
    others = [1, 2, 5, 7]
    assert (status[faulty] == NOT_FINITE).all() and (status[others] == OK).all()
    assert torch.equal(ids[others], expected[0][others]) and not ids[faulty].any()


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_banned_tokens_are_never_taken() -> None:
    rows = draw_rows(6, 97, seed=2)
    rows.logits[:, 40:] = -math.inf
    rows.logits[3] = -math.inf
    rows.logits[4, 7] = math.nan
    rows.logits[5, 7] = math.inf
    ids, status = launch(rows, bans=True)
    assert status.tolist() == [OK, OK, OK, NO_TOKEN, NOT_FINITE, NOT_FINITE]
    assert (ids < 40).all()
    agree((ids, status), rows, bans=True)


def test_a_row_alone_is_the_row_in_a_batch() -> None:
    rows = draw_rows(8, 97, seed=5)
    together = launch(rows)
    for i in range(8):
        ids, status = launch(rows.only(i))
        assert ids == together[0][i] and status == together[1][i]


def test_greedy_batches_need_no_parameters() -> None:
    rows = draw_rows(4, 97, seed=6)
    greedy = RowParams(torch.zeros(4), *rows.params[1:])
    wanted = rows.logits.argmax(dim=-1)
    ids, _ = sample_rows.launch(rows.logits, rows.positions, *greedy, bans=False, greedy=True)
    assert torch.equal(ids, wanted)
    assert torch.equal(launch(Rows(rows.logits, rows.positions, greedy))[0], wanted)


def test_rows_inside_a_wider_tensor_and_no_rows() -> None:
    rows = draw_rows(3, 97, seed=7)
    wide = torch.randn(3, 120)
    wide[:, :97] = rows.logits
    assert torch.equal(launch(rows._replace(logits=wide[:, :97]))[0], launch(rows)[0])
    none = Rows(torch.empty(0, 97), *(t[:0] for t in rows[1:2]), params_of([]))
    assert launch(none)[0].shape == (0,)


def test_operands_that_kernels_would_misread_are_refused() -> None:
    rows = draw_rows(3, 97, seed=8)

    def refused(match: str, **changes: Tensor) -> None:
        given = {"logits": rows.logits, "positions": rows.positions, **rows.params._asdict()}
        with pytest.raises(AssertionError, match=match):
            sample_rows.launch(**{**given, **changes}, bans=False, greedy=False)  # type: ignore[arg-type]

    refused("dense", logits=torch.randn(100, 3).t())
    refused("top_k must be", top_k=rows.params.top_k.long())
    refused("positions must be", positions=rows.positions[:2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 25, 97])
def test_scores(vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(vocab_size)
    logits = (4 * torch.randn(3, 120))[:, :vocab_size].to(dtype)
    ids = torch.randint(0, vocab_size, (3,))
    for with_top in (False, True):
        got = score_rows.launch(logits, ids, with_top)
        assert_scores(got, score_rows.reference(logits, ids, with_top), logits)


def test_equal_scores_come_by_id() -> None:
    logits = torch.zeros(1, 97)
    logits[0, [80, 9, 40]] = 1.0
    _, ids, _ = score_rows.launch(logits, torch.zeros(1, dtype=torch.int64), True)
    assert ids[0].tolist() == [9, 40, 80, *(i for i in range(18) if i != 9)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in subtract")
def test_scores_of_faulty_rows_are_not_finite() -> None:
    logits = torch.randn(4, 40)
    for row, bad in enumerate((math.nan, math.inf, -math.inf)):
        logits[row, 3] = bad
    logits[2] = -math.inf
    chosen, ids, _ = score_rows.launch(logits, torch.full((4,), 3), True)
    assert chosen.isfinite().tolist() == [False, False, False, True]
    assert ((ids >= 0) & (ids < 40)).all()
