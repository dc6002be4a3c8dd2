"""Kernels of linear layers on a GPU, at real sizes: right, repeatable, alike in a graph, and
when they begin before the kernel in front has ended.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import cublas_lt, gated
from tokenspeed.kernels.linear import (
    by_library,
    launch,
    linear_add,
    norm_gate_up,
    norm_linear,
)
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Algorithm, Site, Tile
from tokenspeed.kernels.linear_tuning import candidates, make_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SITES = [
    Site("norm_linear", 4096, 1024, "bfloat16"),
    Site("linear_add", 1024, 3072, "bfloat16"),
    Site("norm_gate_up", 6144, 1024, "bfloat16"),
    Site("linear_add", 4096, 12288, "float16"),
    Site("linear", 151937, 1000, "bfloat16"),
    Site("norm_linear", 6144, 4096, "float32"),
    Site("gate_up", 6144, 1000, "float16"),
]


def exact(call: LinearCall) -> Tensor:
    """In float64, with no rounding on the way."""
    x = call.x.double()
    if call.norm is not None:
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + call.eps) * call.norm.double()
    out = x @ call.w.double().t()
    if call.gate:
        gate, up = out.chunk(2, -1)
        out = F.silu(gate) * up
    return out if call.residual is None else out + call.residual.double()


def error(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def random_weight(site: Site) -> Tensor:
    w = torch.randn(site.num_rows, site.size, device="cuda") / site.size**0.5
    return w.to(getattr(torch, site.dtype))


@pytest.mark.parametrize("site", SITES, ids=str)
def test_candidates_are_as_exact_as_the_library(site: Site) -> None:
    torch.manual_seed(0)
    w = random_weight(site)
    for num_tokens in (1, 3, 17):
        call = make_call(site, w, num_tokens)
        call.check(site.kind)
        want = exact(call)
        library = error(by_library(call), want)
        bound = 1e-6 if site.dtype == "float32" else 1.1 * library + 1e-5
        for tile in list(candidates(site, num_tokens))[::4]:
            got = launch(call, tile)
            assert error(got, want) < bound, (num_tokens, tile, library)
            assert torch.equal(got, launch(call, tile)), (num_tokens, tile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 127, 129, 700, 2049, 5000])
@pytest.mark.parametrize(("num_rows", "size"), [(3072, 1024), (1000, 4096), (72, 200)])
def test_gated_products(num_rows: int, size: int, num_tokens: int, dtype: torch.dtype) -> None:
    """Rows that lie apart, sizes that no block divides, what is behind them poisoned; in a graph,
    and again and again the same bits. The last tile's other half is the next rows of w.
    """
    torch.manual_seed(0)
    x = torch.full((num_tokens + 9, size + 64), torch.nan, device="cuda", dtype=dtype)[:, 8:]
    x = x[:num_tokens, :size].normal_()
    w = torch.randn(2 * num_rows, size, device="cuda", dtype=dtype) / size**0.5
    call = LinearCall(x, w, gate=True)
    assert gated.serves(call)
    bound = 1.1 * error(by_library(call), exact(call)) + 1e-5
    for tile in candidates(Site("gate_up", 2 * num_rows, size, str(dtype)), 4096):
        got = launch(call, tile)
        assert error(got, exact(call)) < bound
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = launch(call, tile)
        for _ in range(3):
            again.fill_(torch.nan)
            graph.replay()
            assert torch.equal(got, again)


def test_operands_that_tma_cannot_address_go_by_the_library() -> None:
    x = torch.randn(300, 1028, device="cuda").bfloat16()
    w = torch.randn(256, 1024, device="cuda").bfloat16() / 32
    (tile, *_) = candidates(Site("gate_up", 256, 1024, "bfloat16"), 4096)
    for rows in (x[:, 3:1027], x[:, 4:]):
        call = LinearCall(rows, w, gate=True)
        assert not gated.serves(call)
        assert torch.equal(launch(call, tile), by_library(call))


@pytest.mark.parametrize("num_tokens", [1, 2, 16])
def test_chains_of_kernels_that_begin_early(num_tokens: int) -> None:
    """Each reads what the one in front wrote: without its wait, it would read the run before's."""
    torch.manual_seed(0)
    o, gate_up, down, qkv = (
        random_weight(Site("", rows, size, "bfloat16"))
        for rows, size in ((1024, 2048), (6144, 1024), (1024, 3072), (4096, 1024))
    )
    norm = torch.ones(1024, device="cuda", dtype=torch.bfloat16)
    start, other = (torch.randn(num_tokens, n, device="cuda").bfloat16() for n in (1024, 2048))

    def chain(wait: bool) -> Tensor:
        x, out = start, other
        for _ in range(8):
            h = pause(linear_add(out, o, x), wait)
            inner = pause(norm_gate_up(h, norm, gate_up, 1e-6), wait)
            x = pause(linear_add(inner, down, h), wait)
            out = pause(norm_linear(x, norm, qkv, None, 1e-6), wait)[:, :2048]
        return out

    want = chain(wait=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(wait=False)
    first = start.clone()
    start.zero_()
    graph.replay()
    assert not torch.equal(got, want)
    start.copy_(first)
    graph.replay()
    assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_tokens", [1, 17, 256, 1000, 4096])
def test_algorithms_of_the_library(num_tokens: int, dtype: torch.dtype) -> None:
    """All that it proposes, for rows that lie apart, with a sum and without, and in a graph."""
    torch.manual_seed(0)
    x = torch.randn(num_tokens, 3000, device="cuda", dtype=dtype)[:, 440:1464]
    w = torch.randn(1536, 1024, device="cuda", dtype=dtype) / 32
    residual = torch.randn(num_tokens, 1536, device="cuda", dtype=dtype)
    found = cublas_lt.proposals(x, w)
    assert found and all(each.problem() is None for each in found)
    for added in (None, residual):
        call = LinearCall(x, w, residual=added)
        want = exact(call)
        bound = 1.1 * error(by_library(call), want) + 1e-5
        for algorithm in found:
            got = cublas_lt.run(x, w, algorithm, added)
            assert got is not None and error(got, want) < bound
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                again = launch(call, algorithm)
            for _ in range(3):
                again.zero_()
                graph.replay()
                assert torch.equal(got, again)


def test_an_algorithm_serves_other_token_counts() -> None:
    w = torch.randn(6144, 4096, device="cuda").bfloat16() / 64
    algorithms = cublas_lt.proposals(torch.randn(4096, 4096, device="cuda").bfloat16(), w)
    assert algorithms
    for num_tokens in (33, 700, 2049, 5000):
        x = torch.randn(num_tokens, 4096, device="cuda").bfloat16()
        want = exact(LinearCall(x, w))
        results = [cublas_lt.run(x, w, each) for each in algorithms]
        served = [got for got in results if got is not None]
        assert served and all(error(got, want) < 3e-3 for got in served)


def test_where_an_algorithm_does_not_serve() -> None:
    x, w = torch.randn(64, 72, device="cuda").half(), torch.randn(40, 64, device="cuda").half()
    algorithm = cublas_lt.proposals(x[:, :64], w)[0]
    other = Algorithm(algorithm.data, algorithm.version + 1)
    assert cublas_lt.run(x[:, :64], w, algorithm) is not None
    assert cublas_lt.run(x[:, :64], w, other) is None
    assert cublas_lt.run(x[:, 1:65], w, algorithm) is None  # 2 bytes off
    assert cublas_lt.run(x[:, :64].float(), w.float(), algorithm) is None
    assert cublas_lt.run(x[:, :64], w, Algorithm("ff" * 64, algorithm.version)) is None
    call = LinearCall(x[:, 1:65], w)
    assert torch.equal(launch(call, algorithm), by_library(call))


def pause(x: Tensor, wait: bool) -> Tensor:
    if wait:
        torch.cuda.synchronize()
    return x


def test_tiles_that_share_columns_leave_no_trace() -> None:
    site = Site("linear_add", 1024, 3072, "bfloat16")
    call = make_call(site, random_weight(site), 7)
    for splits in (2, 3, 8):
        tile = Tile("skinny", rows=32, warps=4, size=128, splits=splits, stages=3)
        first = launch(call, tile)
        assert all(torch.equal(first, launch(call, tile)) for _ in range(20))
