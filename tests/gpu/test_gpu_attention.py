"""Attention kernels at real sizes, compiled: against the reference, and replayed from a graph."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from paged_cases import Case, Operands, assert_pages_agree, operands
from torch import Tensor

from tokenspeed.kernels import kv_store, paged_decode, paged_prefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

CUDA = torch.device("cuda")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TOLERANCE = {BF16: 2e-2, F16: 4e-3, F32: 2e-5}

DECODES = [
    Case((1,) * 5, (1, 2049, 300, 64, 65), 32, 8, 128, norm=True, turned=128, dtype=BF16),
    Case((1,) * 300, tuple(range(1, 301)), 16, 8, 128, norm=True, turned=128, dtype=BF16),
    Case((1,) * 2, (4096, 7), 64, 8, 64, dtype=BF16, sinks=True, window=128, turned=64),
    Case((1,) * 3, (1000, 7, 513), 32, 32, 80, dtype=BF16, turned=32),
    Case((1,) * 3, (1000, 7, 513), 9, 3, 64, dtype=F32, turned=64),
    Case((1,) * 3, (1000, 7, 513), 28, 4, 128, dtype=F32, norm=True, turned=64, sinks=True),
    Case((1,) * 3, (1000, 7, 513), 8, 8, 96, dtype=F16, block_size=1, turned=96),
    Case((1,) * 3, (1000, 7, 513), 8, 2, 256, dtype=BF16, block_size=64, turned=64),
    Case((1,) * 3, (1000, 7, 513), 8, 2, 256, dtype=F32, block_size=32),
    Case((1,), (3000,), 40, 1, 128, dtype=F16, window=1000),
    Case((1,) * 5, (1, 2049, 300, 64, 65), 32, 8, 128, turned=128, dtype=BF16, kv_dtype=E4M3),
    Case((1,) * 300, tuple(range(1, 301)), 16, 8, 128, dtype=BF16, kv_dtype=E4M3),
    Case((1,) * 3, (1000, 7, 513), 9, 3, 64, dtype=BF16, turned=64, kv_dtype=E4M3),
    Case((1,) * 3, (1000, 7, 513), 9, 3, 64, dtype=F32, turned=64, kv_dtype=E4M3),
    Case((1,) * 3, (1000, 7, 513), 8, 2, 64, dtype=F16, sinks=True, window=128, kv_dtype=E5M2),
    Case((1,) * 3, (1000, 7, 513), 8, 2, 128, dtype=BF16, kv_dtype=E5M2),
    Case((1,) * 3, (1000, 7, 513), 8, 2, 128, dtype=F32, kv_dtype=BF16),
]
CHUNKS = [
    Case((700, 1, 33, 128), (700, 2049, 300, 640), 32, 8, 128, norm=True, turned=128, dtype=BF16),
    Case((700, 1, 33), (700, 2049, 300), 64, 8, 64, dtype=BF16, sinks=True, window=128, turned=64),
    Case((200, 33), (200, 300), 32, 32, 80, dtype=BF16, turned=32),
    Case((200, 33), (200, 300), 9, 3, 64, dtype=F32, turned=64),
    Case((200, 33), (200, 300), 28, 4, 128, dtype=F32, norm=True, turned=64, sinks=True),
    Case((200, 33), (200, 300), 8, 8, 96, dtype=F16, block_size=1, turned=96),
    Case((200, 33), (200, 300), 8, 2, 256, dtype=BF16, block_size=64, turned=64),
    Case((200, 33), (200, 300), 8, 2, 256, dtype=F32, block_size=32, window=50),
    Case((300,), (3000,), 40, 1, 128, dtype=F16, window=1000),
    Case((700, 1, 33, 128), (700, 2049, 300, 640), 32, 8, 128, dtype=BF16, kv_dtype=E4M3),
    Case((200, 33), (200, 300), 9, 3, 64, dtype=BF16, turned=64, kv_dtype=E4M3),
    Case((200, 33), (200, 300), 9, 3, 64, dtype=F32, turned=64, kv_dtype=E4M3),
    Case((200, 33), (200, 300), 8, 2, 64, dtype=F16, sinks=True, window=50, kv_dtype=E5M2),
    Case((200, 33), (200, 300), 8, 2, 128, dtype=BF16, kv_dtype=E5M2),
    Case((200, 33), (200, 300), 8, 2, 256, dtype=F32, kv_dtype=BF16),
]


def expected(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    return paged_decode.reference(q, k, v, layer, step, sinks, prologue)


def decode(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    group = q.shape[1] // k.shape[1]
    room = paged_decode.workspace_for(group, q.shape[2], q.device)
    out = paged_decode.launch(q, k, v, layer, step, room, sinks, prologue)
    assert not room.arrived.any(), "a workspace is left as it was found"
    return out


def prefill(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    queries = kv_store.launch(q, k, v, layer, step, prologue)
    return paged_prefill.launch(queries, layer, step, sinks)


def assert_agree(got: Tensor, want: Tensor, mine: Operands, theirs: Operands) -> None:
    tolerance = TOLERANCE[got.dtype]
    if mine.prologue is not None and mine.layer.converts(got.dtype):
        tolerance = 3e-2  # a key's next number in fp8
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for a, b in ((mine.layer.keys, theirs.layer.keys), (mine.layer.values, theirs.layer.values)):
        assert_pages_agree(a, b, tolerance)


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decodes(case: Case) -> None:
    given = operands(case, CUDA)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    assert_agree(decode(mine), expected(theirs), mine, theirs)


@pytest.mark.parametrize("case", CHUNKS + DECODES[:3], ids=str)
def test_chunks(case: Case) -> None:
    given = operands(case, CUDA)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    assert_agree(prefill(mine), expected(theirs), mine, theirs)


def test_a_graph_captured_for_long_contexts_serves_short_ones() -> None:
    case = Case((1,) * 4, (9, 100, 2000, 31), 32, 8, 128, dtype=BF16, norm=True, turned=128)
    mine = operands(case, CUDA)
    mine = mine._replace(step=replace(mine.step, max_context_len=32768))
    q, k, v, layer, step, sinks, prologue = mine
    room = paged_decode.workspace_for(4, 128, CUDA)
    paged_decode.launch(q, k, v, layer, step, room, sinks, prologue)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_decode.launch(q, k, v, layer, step, room, sinks, prologue)
    for lengths in ([9, 100, 2000, 31], [1, 1, 1, 1], [8, 64, 1999, 30]):
        step.context_lens.copy_(torch.tensor(lengths))
        step.positions.copy_(torch.tensor(lengths) - 1)
        q.copy_(torch.randn_like(q))
        theirs = mine.with_own_cache()
        graph.replay()
        assert_agree(out, expected(theirs), mine, theirs)


def test_rows_of_one_token_beside_chunks() -> None:
    case = Case((1, 1, 1, 300, 77), (700, 9, 2049, 300, 500), 32, 8, 128, dtype=BF16, turned=128)
    mine, theirs = operands(case, CUDA).with_own_cache(), operands(case, CUDA)
    q, k, v, layer, step, sinks, prologue = mine
    step = replace(step, num_decodes=3)
    room = paged_decode.workspace_for(4, 128, CUDA)
    out = paged_decode.launch(q, k, v, layer, step.decodes(), room, sinks, prologue)
    queries = kv_store.launch(q, k, v, layer, step, prologue)
    paged_prefill.launch(queries, layer, step.chunks(), sinks, out)
    assert_agree(out, expected(theirs), mine, theirs)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_numbers_saturate_and_nan_stays(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Every number of 16 bits, in keys and values."""
    case = Case((1024,), (1024,), 1, 1, 64, dtype=dtype, kv_dtype=kv_dtype)
    mine, theirs = operands(case, CUDA).with_own_cache(), operands(case, CUDA)
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16, device=CUDA)
    every = bits.view(BF16 if dtype == F32 else dtype).to(dtype).view(1024, 1, 64)
    kv_store.launch(mine.q, every, every, mine.layer, mine.step, None)
    kv_store.reference(theirs.q, every, every, theirs.layer, theirs.step, None)
    for a, b in ((mine.layer.keys, theirs.layer.keys), (mine.layer.values, theirs.layer.values)):
        torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    there = mine.layer.keys[1:].float()
    assert there.isnan().any() and there.nan_to_num(0).abs().max() == torch.finfo(kv_dtype).max


def test_splits_repeat_bit_for_bit() -> None:
    """Whichever program comes last merges in the same order."""
    given = operands(Case((1,), (5000,), 32, 8, 128, dtype=BF16), CUDA)
    first = decode(given)
    assert all(torch.equal(decode(given), first) for _ in range(20))
