"""The storage of the paged cache."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from tokenspeed.kv.pool import KV_DTYPES, PagePool, bytes_per_page
from tokenspeed.kv.specs import CacheGroup, FullAttention, cache_groups

NARROW = FullAttention(num_heads=4, num_kv_heads=2, head_dim=8, scale=1.0)
WIDE = FullAttention(num_heads=4, num_kv_heads=4, head_dim=16, scale=1.0)
CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", KV_DTYPES.values())
def test_pages_by_layer_are_zero_and_writable(dtype: torch.dtype) -> None:
    pool = PagePool(cache_groups([NARROW, WIDE, NARROW]), 5, 16, dtype, CPU)
    shapes = [(6, 16, 2, 8), (6, 16, 4, 16), (6, 16, 2, 8)]
    assert pool.num_pages == pool.scratch_page == 5
    for tensors in (pool.keys, pool.values):
        assert [tuple(tensor.shape) for tensor in tensors] == shapes
        assert all(t.dtype == dtype and t.is_contiguous() for t in tensors)
        assert not any(t.float().any() for t in tensors)
    assert pool.k_scales == pool.v_scales == [1.0] * 3
    pool.keys[0].fill_(1.0)
    assert not pool.keys[2].float().any() and not pool.values[0].float().any()


@pytest.mark.parametrize("dtype", KV_DTYPES.values())
def test_bytes_of_a_page_are_what_the_pool_takes(dtype: torch.dtype) -> None:
    groups = cache_groups([NARROW, WIDE, NARROW])
    pool = PagePool(groups, 3, 16, dtype, CPU)
    held = sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert (3 + 1) * bytes_per_page(groups, 16, dtype) == held


def test_scales_are_of_every_layer() -> None:
    groups = cache_groups([NARROW, WIDE])
    scales = [(0.5, 2.0), (0.25, 4.0)]
    pool = PagePool(groups, 3, 16, torch.float8_e4m3fn, CPU, scales)
    assert (pool.k_scales, pool.v_scales) == ([0.5, 0.25], [2.0, 4.0])
    with pytest.raises(AssertionError, match="scales of 1 of 2 layers"):
        PagePool(groups, 3, 16, torch.float8_e4m3fn, CPU, scales[:1])


def test_a_large_pool_costs_nothing_until_used() -> None:
    def resident_bytes() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    before = resident_bytes()
    pool = PagePool(cache_groups([NARROW]), (1 << 20) - 1, 16, torch.float32, CPU)
    pool.keys[0][1 << 19] = 1.0
    assert pool.keys[0].nbytes == pool.values[0].nbytes == 1 << 30
    assert resident_bytes() - before < 64 << 20


def test_a_pool_is_this_process_s_own() -> None:
    """A child that is forked off must not write into it; and shared memory has a limit of its own
    in a container.
    """
    pool = PagePool(cache_groups([NARROW]), 64, 16, torch.float32, CPU)
    address = pool.keys[0].data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            assert line.split()[1] == "rw-p"
            return
    raise AssertionError("not mapped")


@pytest.mark.parametrize("num_pages", [1 << 40, 1 << 60])
def test_a_pool_beyond_all_memory_says_what_to_do(num_pages: int) -> None:
    with pytest.raises(MemoryError, match="lower --max-total-tokens"):
        PagePool(cache_groups([NARROW]), num_pages, 16, torch.float32, CPU)


def test_layers_must_be_complete() -> None:
    with pytest.raises(AssertionError, match="cover every layer"):
        PagePool([CacheGroup(NARROW, (0, 2))], 4, 16, torch.float32, CPU)
    with pytest.raises(AssertionError, match="0 pages"):
        PagePool(cache_groups([NARROW]), 0, 16, torch.float32, CPU)
