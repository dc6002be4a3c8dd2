"""Sampling and scoring kernels at real sizes, compiled: against the references, alone and in
batches, again, in a CUDA graph, and without a wait for the device.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from sampler_cases import EOS, start
from sampling_cases import KINDS, Rows, agree, assert_scores, draw_rows, launch, params_of

from tokenspeed.engine.sampler import Sampled, plan_sampling, sample
from tokenspeed.kernels import sample_rows, score_rows
from tokenspeed.kernels.sample_rows import NO_TOKEN, NOT_FINITE, OK

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
VOCAB = 151936
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)


def rows_on_gpu(count: int, vocab_size: int = VOCAB, **options: object) -> Rows:
    return draw_rows(count, vocab_size, device=CUDA, **options)  # type: ignore[arg-type]


@contextmanager
def no_wait() -> Iterator[None]:
    """An operation that waits for the device is an error."""
    try:
        with warnings.catch_warnings(action="ignore"):  # that this mode does not see all that waits
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@DTYPES
@pytest.mark.parametrize("spread", [1.0, 3.0, 8.0])
@pytest.mark.parametrize(("count", "vocab_size"), [(1, VOCAB), (9, 32000), (256, VOCAB), (3, 513)])
def test_tokens_of_the_reference(
    count: int, vocab_size: int, spread: float, dtype: torch.dtype
) -> None:
    for seed in range(8 if count == 1 else 1):
        rows = rows_on_gpu(count + seed, vocab_size, dtype=dtype, seed=seed, spread=spread)
        if count == 1:
            rows = rows.only(seed)
        agree(launch(rows), rows)


@pytest.mark.parametrize(
    "params",
    [
        {"top_k": 1},
        {"top_k": 1000, "top_p": 0.5},
        {"top_k": 5000, "top_p": 0.8},  # more than groups: by bisection over the row
        {"top_k": 5000},
        {"top_p": 0.01},
        {"top_p": 0.99999},
        {"min_p": 1.0},
        {"min_p": 1e-6, "top_p": 0.7},
    ],
    ids=str,
)
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_uncommon_cuts(params: dict[str, float], spread: float) -> None:
    """Spread 0: all tokens tie, more than there is room for."""
    torch.manual_seed(1)
    logits = spread * torch.randn(6, VOCAB, device=CUDA)
    asked = [{"temperature": 0.9, **params}] * 6
    rows = Rows(logits, torch.arange(6, device=CUDA), params_of(asked, CUDA))
    agree(launch(rows), rows)


def test_many_ties() -> None:
    torch.manual_seed(2)
    logits = (3 * torch.randn(32, VOCAB, device=CUDA)).round()
    rows = rows_on_gpu(32)._replace(logits=logits)
    agree(launch(rows), rows)


@DTYPES
def test_alone_in_a_batch_and_again(dtype: torch.dtype) -> None:
    rows = rows_on_gpu(64, dtype=dtype, spread=2.0)
    ids, status = launch(rows)
    for _ in range(10):
        again = launch(rows)
        assert torch.equal(again[0], ids) and torch.equal(again[1], status)
    for i in range(0, 64, 3):
        assert launch(rows.only(i))[0] == ids[i]


def test_faulty_and_banned_rows() -> None:
    rows = rows_on_gpu(16)
    expected, _ = launch(rows)
    rows.logits[3, VOCAB - 1] = math.nan
    rows.logits[8, 0] = math.inf
    rows.logits[13, 77777] = -math.inf
    ids, status = launch(rows)
    faulty = [3, 8, 13]
    others = [i for i in range(16) if i not in faulty]
    assert status[faulty].tolist() == [NOT_FINITE] * 3 and (status[others] == OK).all()
    assert torch.equal(ids[others], expected[others])
    rows.logits[:, 500:] = -math.inf
    rows.logits[10] = -math.inf
    ids, status = launch(rows, bans=True)
    assert status[[3, 8, 10, 13]].tolist() == [OK, NOT_FINITE, NO_TOKEN, OK]
    assert (ids < 500).all()
    agree((ids, status), rows, bans=True)


def test_a_graph_serves_whatever_its_tensors_hold() -> None:
    rows = rows_on_gpu(8, dtype=torch.bfloat16)
    launch(rows)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = launch(rows)
    for seed in range(1, 6):
        new = rows_on_gpu(8, dtype=torch.bfloat16, seed=seed, spread=float(seed))
        asked = [KINDS[(i * seed) % len(KINDS)] for i in range(8)]
        new = new._replace(params=params_of(asked, CUDA))
        for kept, changed in zip(
            (rows.logits, rows.positions, *rows.params),
            (new.logits, new.positions, *new.params),
            strict=True,
        ):
            kept.copy_(changed)
        graph.replay()
        agree(got, new)


def test_the_ops_launch_kernels_and_never_wait() -> None:
    rows = rows_on_gpu(8)
    expected = launch(rows)
    arguments = (rows.logits, rows.positions, *rows.params, False, False)
    sample_rows.sample_rows(*arguments)
    score_rows.score_rows(rows.logits, expected[0], True)
    with no_wait():
        ids, status = sample_rows.sample_rows(*arguments)
        score_rows.score_rows(rows.logits, ids, True)
    assert torch.equal(ids, expected[0]) and torch.equal(status, expected[1])


def test_the_sampler_gives_the_tokens_of_a_cpu() -> None:
    """Edits and masks included."""
    torch.manual_seed(4)
    logits = 3 * torch.randn(8, 2000)
    masks = torch.rand(8, 2000) < 0.7
    tokens = torch.randint(0, 2000, (8, 24), dtype=torch.int32)
    asked = [dict(kind, seed=i) for i, kind in enumerate(KINDS)]
    asked[1]["repetition_penalty"], asked[4]["min_tokens"] = 1.5, 20
    starts = [start(i, tokens[i, :9].tolist(), 5, **each) for i, each in enumerate(asked)]
    lengths = torch.full((8,), 9)

    def found(device: torch.device, masks: torch.Tensor | None) -> Sampled:
        plan = plan_sampling(starts, EOS, 2000, 24, device)
        moved = [each.to(device) for each in (logits, tokens, lengths)]
        own_masks = None if masks is None else masks.to(device)
        return sample(moved[0], plan, moved[1], moved[2], own_masks)

    for each in (None, masks):
        ours, theirs = found(CUDA, each), found(torch.device("cpu"), each)
        assert torch.equal(ours.ids.cpu(), theirs.ids)
        assert torch.equal(ours.status.cpu(), theirs.status)


@DTYPES
@pytest.mark.parametrize(("count", "vocab_size"), [(1, VOCAB), (256, VOCAB), (5, 513), (2, 7)])
def test_scores(count: int, vocab_size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(count)
    logits = (3 * torch.randn(count, vocab_size, device=CUDA)).to(dtype)
    ids = torch.randint(0, vocab_size, (count,), device=CUDA)
    for with_top in (False, True):
        got = score_rows.launch(logits, ids, with_top)
        assert_scores(got, score_rows.reference(logits, ids, with_top), logits)
