"""Paged attention kernels in Triton's interpreter: run by test_kernels_paged_attention.py in a
process of its own, with TRITON_INTERPRET=1.

In float32 and float16: the interpreter multiplies matrices of bfloat16 wrongly. They are tested on
a GPU, as are real sizes. Pages may be of any dtype: what is cast is cast by torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from interpreted_casts import casts_by_torch
from paged_cases import Case, Operands, assert_pages_agree, device_step, operands
from torch import Tensor

from tokenspeed.kernels import kv_store, paged_decode, paged_prefill
from tokenspeed.kernels.attend import reference
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.paged_layer import places_of
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import FullAttention, cache_groups

__all__ = ["casts_by_torch"]

# Of the interpreter, where a loop's bound was loaded.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

CPU = torch.device("cpu")
F16 = torch.float16
FP8S = (torch.float8_e4m3fn, torch.float8_e5m2)
SPECS = [
    FullAttention(num_heads=6, num_kv_heads=2, head_dim=8, scale=0.3),
    FullAttention(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.2),
    FullAttention(num_heads=2, num_kv_heads=2, head_dim=16, scale=0.2, window=9),
]

DECODES = [
    Case((1, 1), (1, 66), norm=True, turned=64),
    Case((1, 1, 1), (65, 64, 192), 6, 2, 16, turned=16),  # at the borders of pages and splits
    Case((1,), (300,), 2, 1, 128, dtype=F16, norm=True, turned=128, block_size=64),
    Case((1, 1), (150, 17), 3, 1, 80, sinks=True, turned=26, block_size=4),
    Case((1, 1), (150, 17), 4, 2, 16, sinks=True, window=40, block_size=1),
    Case((1, 1), (150, 17), 17, 1, 24, window=130),
    Case((1, 1), (1, 66), norm=True, turned=64, kv_dtype=FP8S[0]),
    Case((1, 1), (150, 17), 3, 1, 80, sinks=True, turned=26, block_size=4, kv_dtype=FP8S[1]),
    Case((1,), (300,), 2, 1, 128, dtype=F16, block_size=64, kv_dtype=FP8S[0]),
]
CHUNKS = [
    Case((3, 1, 40), (3, 70, 140), norm=True, turned=64),
    Case((64, 33), (65, 64), 6, 2, 16, turned=16),
    Case((40,), (130,), 2, 1, 128, dtype=F16, norm=True, turned=128, block_size=64),
    Case((9, 1), (150, 17), 3, 1, 80, sinks=True, turned=26, block_size=4),
    Case((30, 2), (150, 17), 4, 2, 16, sinks=True, window=40, block_size=1),
    Case((5, 17), (60, 17), 33, 1, 24),
    Case((3, 1, 40), (3, 70, 140), norm=True, turned=64, kv_dtype=FP8S[0]),
    Case((30, 2), (150, 17), 4, 2, 16, window=40, block_size=1, kv_dtype=FP8S[1]),
    Case((9,), (130,), 2, 1, 128, kv_dtype=torch.bfloat16),
]


def decode(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    room = paged_decode.workspace_for(q.shape[1] // k.shape[1], q.shape[2], CPU)
    out = paged_decode.launch(q, k, v, layer, step, room, sinks, prologue)
    assert not room.arrived.any(), "a workspace is left as it was found"
    return out


def prefill(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    queries = kv_store.launch(q, k, v, layer, step, prologue)
    return paged_prefill.launch(queries, layer, step, sinks)


def assert_agree(got: Tensor, want: Tensor, mine: Operands, theirs: Operands) -> None:
    tolerance = 1e-5 if got.dtype == torch.float32 else 4e-3
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    for a, b in ((mine.layer.keys, theirs.layer.keys), (mine.layer.values, theirs.layer.values)):
        assert_pages_agree(a, b, tolerance)


def expected(own: Operands) -> Tensor:
    q, k, v, layer, step, sinks, prologue = own
    return paged_decode.reference(q, k, v, layer, step, sinks, prologue)


@pytest.mark.parametrize("case", DECODES, ids=str)
def test_decodes(case: Case) -> None:
    mine, theirs = operands(case, CPU).with_own_cache(), operands(case, CPU)
    assert_agree(decode(mine), expected(theirs), mine, theirs)


@pytest.mark.parametrize("case", CHUNKS + DECODES[:1], ids=str)
def test_chunks(case: Case) -> None:
    mine, theirs = operands(case, CPU).with_own_cache(), operands(case, CPU)
    assert_agree(prefill(mine), expected(theirs), mine, theirs)


@pytest.mark.parametrize("case", CHUNKS[:3] + CHUNKS[-3:], ids=str)
def test_own_keys_and_values_are_those_that_are_stored(case: Case) -> None:
    given = operands(case, CPU)
    for store in (kv_store.launch, kv_store.reference):
        q, k, v, layer, step, _, prologue = given.with_own_cache()
        keys, values = (torch.empty(k.shape, dtype=k.dtype) for _ in "kv")
        store(q, k, v, layer, step, prologue, keys, values)
        places = places_of(layer, step)
        for own, pages, scale in (
            (keys, layer.keys, layer.k_scale),
            (values, layer.values, layer.v_scale),
        ):
            there = pages.flatten(0, 1)[places].float() * scale
            torch.testing.assert_close(own, there.to(own.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", FP8S, ids=str)
@pytest.mark.parametrize("decodes", [True, False])
def test_numbers_saturate_and_nan_stays(dtype: torch.dtype, decodes: bool) -> None:
    """The first token has numbers from the smallest to the largest, both infinities and NaN."""
    given = operands(Case((9,), (9,), 1, 1, 256, kv_dtype=dtype), CPU)
    powers = 10 ** torch.linspace(-9, 9, 256) * torch.randn(256).sign()
    powers[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    given.k[0], given.v[0] = powers, powers.flip(0)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    if decodes:
        one = device_step([0], [1], [1], CPU)
        q, k, v = (x[:1] for x in given[:3])
        paged_decode.launch(q, k, v, mine.layer, one, paged_decode.workspace_for(1, 256, CPU))
        kv_store.reference(q, k, v, theirs.layer, one, None)
    else:
        kv_store.launch(*mine[:5], None)
        kv_store.reference(*theirs[:5], None)
    assert_pages_agree(mine.layer.keys, theirs.layer.keys, 0)
    assert_pages_agree(mine.layer.values, theirs.layer.values, 0)
    stored = theirs.layer.keys[1, 0].float()
    assert stored.isnan().sum() == 1
    assert stored.nan_to_num(0).abs().max() == torch.finfo(dtype).max


def test_splits_follow_the_length_and_not_its_bound() -> None:
    """A step captured for long contexts: the programs of a third axis have nothing to do."""
    given = operands(Case((1, 1), (90, 3), 4, 2, 16), CPU)
    mine, theirs = given.with_own_cache(), given
    mine = mine._replace(step=replace(mine.step, max_context_len=4096))
    assert paged_decode.num_splits(4, 4096) > 1
    assert_agree(decode(mine), expected(theirs), mine, theirs)


def test_a_row_gets_the_same_alone_and_in_a_batch() -> None:
    case = Case((1, 1, 1), (70, 150, 9), 4, 2, 16)
    together = operands(case, CPU)
    whole = decode(together.with_own_cache())
    for row, length in enumerate(case.context_lens):
        step = device_step([2 - row], [1], [length], CPU)
        q, k, v = (x[row : row + 1] for x in together[:3])
        alone = together.with_own_cache()._replace(q=q, k=k, v=v, step=step)
        torch.testing.assert_close(decode(alone)[0], whole[row], rtol=1e-5, atol=1e-5)


class Trial:
    """Two sequences, four layers in three groups, one with a window; a pool for each
    backend, and steps are run by both.
    """

    def __init__(self) -> None:
        torch.manual_seed(5)
        layers = [SPECS[0], SPECS[1], SPECS[0], SPECS[2]]
        groups = cache_groups(list(layers))
        self.pools = [PagePool(groups, 40, 4, torch.float32, CPU) for _ in range(2)]
        # Slot 0 is a scratch slot, whose page nobody else has.
        self.tables = [torch.randperm(39).int()[:30].view(2, 15) + 1 for _ in groups]
        self.tables = [torch.cat((torch.zeros_like(t[:1]), t)) for t in self.tables]
        self.ours = TritonAttention(groups, self.pools[0], self.tables)
        self.torch = TorchAttention(groups, self.pools[1])
        self.qkv = [
            [torch.randn(3, 60, n, s.head_dim) for n in (s.num_heads, *[s.num_kv_heads] * 2)]
            for s in layers
        ]
        self.specs = layers
        self.done = [0, 0, 0]

    def step(self, rows: Sequence[tuple[int, int]], num_decodes: int = 0) -> None:
        """(slot, n): the next n tokens of a slot; the scratch slot has always the first."""
        slots, counts = [slot for slot, _ in rows], [n for _, n in rows]
        lengths = [self.done[slot] + n for slot, n in rows]
        device = device_step(slots, counts, lengths, CPU)
        self.ours.plan_device(replace(device, num_decodes=num_decodes))
        tables = [[table[slot].long() for slot in slots] for table in self.tables]
        self.torch.plan(AttentionStep(device.query_starts.tolist(), lengths, tables))
        for layer, qkv in enumerate(self.qkv):
            spans = list(zip(slots, counts, lengths, strict=True))
            parts = [[x[slot, n - count : n] for slot, count, n in spans] for x in qkv]
            q, k, v = map(torch.cat, parts)
            want = self.torch.attend(q, k, v, layer, None)
            torch.testing.assert_close(self.ours.attend(q, k, v, layer, None), want)
            for (slot, count, n), begin in zip(spans, device.query_starts.tolist(), strict=False):
                spec = self.specs[layer]
                whole = reference(*(x[slot, :n] for x in qkv), spec.scale, spec.window)
                torch.testing.assert_close(want[begin : begin + count], whole[-count:])
        for slot, n in rows:
            self.done[slot] += n if slot else 0
        for a, b in zip(*(pool.keys + pool.values for pool in self.pools), strict=True):
            assert torch.equal(a, b)


def test_steps_like_the_torch_backend() -> None:
    trial = Trial()
    trial.step([(1, 7), (2, 30)])
    trial.step([(2, 1), (1, 1)])
    trial.step([(1, 20), (2, 1)])
    trial.step([(2, 1), (1, 9)], num_decodes=1)
    trial.step([(1, 1), (2, 1), (0, 1), (0, 1)])  # a padded batch


def test_tokens_of_no_row_get_zeros() -> None:
    trial = Trial()
    trial.ours.plan_device(device_step([1, 2], [1, 2], [1, 2], CPU))
    out = trial.ours.attend(*(x[1, :5] for x in trial.qkv[0]), 0, None)
    assert out[:3].any() and not out[3:].any()


def test_operands_that_kernels_would_misread_are_refused() -> None:
    q, k, v, layer, step, _, prologue = operands(Case((1,), (5,), turned=64), CPU)
    room = paged_decode.workspace_for(2, 64, CPU)
    with pytest.raises(AssertionError, match="for pages"):
        paged_decode.launch(q, k[..., 1:], v, layer, step, room)
    with pytest.raises(AssertionError, match="rows must lie dense"):
        kv_store.launch(q.mT.contiguous().mT, k, v, layer, step, None)
    with pytest.raises(AssertionError, match="angles in"):
        assert prologue is not None
        narrow = prologue._replace(cos=prologue.cos.half())
        paged_decode.launch(q, k, v, layer, step, room, None, narrow)
    with pytest.raises(AssertionError, match="sinks"):
        paged_decode.launch(q, k, v, layer, step, room, torch.ones(3))
    with pytest.raises(AssertionError, match="one token of each row"):
        two = device_step([0], [2], [5], CPU)
        paged_decode.launch(q, k, v, layer, two, room)
    with pytest.raises(AssertionError, match="must be dense"):
        replace(step, positions=step.positions.int())
