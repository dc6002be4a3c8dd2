"""Steps over a paged cache, for tests of attention kernels in the interpreter and on a GPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.kv_dtype import raw, stored
from tokenspeed.kernels.paged_layer import PagedLayer


def device_step(
    slots: list[int], query_lens: list[int], context_lens: list[int], device: torch.device
) -> DeviceStep:
    rows = list(zip(query_lens, context_lens, strict=True))
    starts = [sum(query_lens[:i]) for i in range(len(rows) + 1)]
    positions = [at for n, length in rows for at in range(length - n, length)]
    token_rows = [i for i, n in enumerate(query_lens) for _ in range(n)]

    def ints(values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DeviceStep(
        num_rows=len(rows),
        num_tokens=len(positions),
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
        slots=ints(slots),
        query_starts=ints(starts),
        context_lens=ints(context_lens),
        positions=ints(positions, torch.int64),
        token_rows=ints(token_rows),
    )


SCALES = (0.3, 0.7)
"""Of keys and values in pages of another dtype."""


@dataclass(frozen=True)
class Case:
    """One step of one layer. `turned` elements of a head are subject to RoPE (0: no prologue)."""

    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    num_heads: int = 4
    num_kv_heads: int = 2
    size: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    sinks: bool = False
    window: int = 0
    norm: bool = False
    turned: int = 0
    kv_dtype: torch.dtype | None = None
    """Of pages, if it is another than `dtype`; such pages have scales."""


class Operands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    layer: PagedLayer
    step: DeviceStep
    sinks: Tensor | None
    prologue: Prologue | None

    def with_own_cache(self) -> Operands:
        layer = self.layer
        own = replace(layer, keys=layer.keys.clone(), values=layer.values.clone())
        return self._replace(layer=own)


def operands(case: Case, device: torch.device) -> Operands:
    """Random operands. Pages are shuffled, slots reversed; all the cache behind a context and every
    page of no row is NaN, and so is what a table names behind the pages in use.
    """
    torch.manual_seed(len(case.query_lens) + case.size)
    num_rows = len(case.context_lens)
    num_pages = [-(-length // case.block_size) for length in case.context_lens]
    shape = (sum(num_pages) + 1, case.block_size, case.num_kv_heads, case.size)
    kv_dtype = case.kv_dtype or case.dtype
    keys, values = (torch.full(shape, torch.nan, device=device).to(kv_dtype) for _ in "kv")
    scales = (1.0, 1.0) if kv_dtype == case.dtype else SCALES
    like = torch.empty(0, dtype=case.dtype, device=device)
    slots = list(range(num_rows))[::-1]
    free = torch.randperm(sum(num_pages), device=device).int() + 1
    table = torch.zeros(num_rows, max(num_pages) + 1, dtype=torch.int32, device=device)
    for slot, pages, length in zip(slots, num_pages, case.context_lens, strict=True):
        table[slot, :pages], free = free[:pages], free[pages:]
        own = table[slot, :pages].long()
        for cache, scale in zip((keys, values), scales, strict=True):
            tokens = raw(cache)[own].flatten(0, 1)
            new = _draw(length, *shape[2:], like=like)
            tokens[:length] = raw(stored(new, scale, kv_dtype))
            raw(cache)[own] = tokens.unflatten(0, (pages, case.block_size))
    step = device_step(slots, list(case.query_lens), list(case.context_lens), device)
    heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
    merged = _draw(step.num_tokens, sum(heads) * case.size, like=like)
    q, k, v = (
        part.unflatten(-1, (-1, case.size))
        for part in merged.split([n * case.size for n in heads], -1)
    )
    layer = PagedLayer(keys, values, table, case.size**-0.5, case.window, *scales)
    sinks = 2 * _draw(case.num_heads, like=like) if case.sinks else None
    return Operands(q, k, v, layer, step, sinks, _prologue(case, step, like=like))


def _prologue(case: Case, step: DeviceStep, like: Tensor) -> Prologue | None:
    if not case.turned:
        return None
    angles = 3 * _draw(step.num_tokens, 1, case.turned // 2, like=like.new_empty(0).float())
    weights = [1 + _draw(case.size, like=like) / 4 if case.norm else None for _ in "qk"]
    return Prologue(*weights, angles.cos(), angles.sin(), 1e-5)


def _draw(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, device=like.device).to(like.dtype)


def assert_pages_agree(found: Tensor, expected: Tensor, tolerance: float) -> None:
    """In fp8 the same numbers, if `tolerance` is 0. Otherwise what is stored may be a rounding off,
    and then, rarely, the next number.
    """
    if found.dtype.itemsize > 1:
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)
        return
    a, b = found.float(), expected.float()
    if tolerance == 0:
        assert torch.equal(a.nan_to_num(torch.inf), b.nan_to_num(torch.inf))
        return
    assert (a.nan_to_num(torch.inf) != b.nan_to_num(torch.inf)).float().mean() < 0.02
    near, smallest = torch.finfo(found.dtype).eps, torch.finfo(found.dtype).smallest_normal
    torch.testing.assert_close(a, b, rtol=near, atol=smallest * near, equal_nan=True)
