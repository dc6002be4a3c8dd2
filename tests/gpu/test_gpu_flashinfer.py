"""FlashInfer's FlashAttention-3 beside the Triton kernels, at real sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from flashinfer_cases import attend, host_of, make, runs_flashinfer, spec_of
from paged_cases import Case, assert_pages_agree, operands

from tokenspeed.kernels import kv_store, paged_prefill
from tokenspeed.kernels.attention_flashinfer import FlashInferAttention, GroupPrefill
from tokenspeed.kernels.attention_triton import TritonAttention

CUDA, BF16, E4M3 = torch.device("cuda"), torch.bfloat16, torch.float8_e4m3fn

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not runs_flashinfer(),
        reason="needs a GPU of compute capability 9.0, flashinfer and its built kernels",
    ),
    pytest.mark.filterwarnings("ignore"),  # of what FlashInfer imports
]


CASES = [
    (Case((4096,), (4096,), 32, 8, 128, norm=True, turned=128, dtype=BF16), 0),
    (Case((700, 1, 33, 128), (700, 2049, 300, 640), 32, 8, 128, turned=128, dtype=BF16), 0),
    (Case((1, 1, 1, 300, 77), (700, 9, 2049, 8300, 500), 16, 8, 128, dtype=BF16), 3),
    (Case((128,) * 24, tuple(range(1000, 1024)), 32, 8, 128, norm=True, turned=128, dtype=BF16), 0),
    (Case((300, 17), (300, 4000), 64, 8, 128, dtype=BF16, block_size=1), 0),
    (Case((300, 17, 513), (4000, 17, 513), 32, 8, 128, dtype=BF16), 0),
    (Case((1, 1, 300, 17, 129), (9, 700, 900, 17, 129), 16, 8, 128, dtype=BF16), 2),
    (Case((1, 2048), (9, 2048), 16, 8, 128, dtype=BF16), 1),
    (Case((300, 17), (300, 4000), 8, 8, 128, dtype=BF16, block_size=64), 0),
    (Case((257,), (1000,), 40, 1, 128, dtype=BF16, block_size=32), 0),
    (Case((4096,), (4096,), 32, 8, 128, norm=True, turned=128, dtype=BF16, kv_dtype=E4M3), 0),
    (Case((700, 1, 33, 128), (700, 2049, 300, 640), 32, 8, 128, dtype=BF16, kv_dtype=E4M3), 0),
    (Case((1, 1, 300, 17, 129), (9, 700, 900, 17, 129), 16, 8, 128, dtype=BF16, kv_dtype=E4M3), 2),
    (Case((300, 17), (300, 4000), 8, 8, 128, dtype=BF16, block_size=1, kv_dtype=E4M3), 0),
]


@pytest.mark.parametrize(("case", "num_decodes"), CASES, ids=str)
def test_chunks_like_triton(case: Case, num_decodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(case, CUDA)
    step = replace(given.step, num_decodes=num_decodes)
    mine, theirs = given.with_own_cache(), given.with_own_cache()
    want = attend(TritonAttention, case, theirs, step)
    monkeypatch.setattr(paged_prefill, "launch", None)  # FlashInfer it is
    step = replace(step, host=host_of(given, num_decodes))
    got = attend(FlashInferAttention, case, mine, step)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    for a, b in ((mine.layer.keys, theirs.layer.keys), (mine.layer.values, theirs.layer.values)):
        assert_pages_agree(a, b, 0)


def test_plans_run_ahead_of_the_device() -> None:
    """Each step is planned before the device has begun with the one in front of it."""
    shapes = [((90, 300 + 64 * i), (700 - 50 * i, 300 + 64 * i)) for i in range(6)]
    cases = [Case(*shape, 32, 8, 128, dtype=BF16) for shape in shapes]
    given = [operands(case, CUDA) for case in cases]
    hosts = [host_of(each, 0) for each in given]
    queries = [kv_store.launch(q, k, v, layer, step, None) for q, k, v, layer, step, *_ in given]
    outs = [torch.empty(q.shape, dtype=BF16, device=CUDA) for q in queries]
    prefill = GroupPrefill(0, spec_of(cases[0]), given[0].layer.keys, make)
    prefill.warm_up(given[0].layer)
    torch.cuda.synchronize()
    for own, host, q, out in zip(given, hosts, queries, outs, strict=True):
        torch.cuda._sleep(100_000_000)
        prefill.plan(host)
        prefill.run(q, (own.k, own.v), own.layer, out)
    for own, q, out in zip(given, queries, outs, strict=True):
        want = paged_prefill.launch(q, own.layer, own.step)
        torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)
