"""`paged_prefill`: causal attention of each row's new tokens over its pages, which hold them.

Rows may have any past and any number of tokens, one included. A tile is a few tokens of one row
with all the query heads of one key head, so that a row of one token, too, reads each key once.
Which row a tile belongs to is searched for on the device. Shapes: q [T, Hq, D] -> [T, Hq, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.paged_layer import PagedLayer, assert_heads, paged_attention_reference
from tokenspeed.kernels.paged_tiles import LOG2_E, finish, fold_tile, tile_tokens
from tokenspeed.kernels.triton_jit import assert_rows, block_of, gdc, jit, launches_early, tl

reference = paged_attention_reference


@jit
def _row_of_tile(query_starts, num_rows, tile, TOKENS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The last row whose first tile is not behind `tile`. Row i's tiles begin at
    query_starts[i] // TOKENS + i: room for all before it, with at most one tile left empty a row.
    """
    low, high = 0, num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@jit
def _attend_tile(  # type: ignore[no-untyped-def]
    queries, position, first, end, keys, values, pages, head, scale,
    HKV: tl.constexpr, D: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The softmax of queries [M, BLOCK] at `position` [M] >= `first` over tokens before `end`."""
    M: tl.constexpr = queries.shape[0]
    BLOCK: tl.constexpr = queries.shape[1]
    top, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK], tl.float32)
    if WINDOW > 0:
        low = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
    else:
        low = (first + 1) // BLOCK_N * BLOCK_N  # what all of them see needs no mask
        for start in range(0, low, BLOCK_N):
            n = start + tl.arange(0, BLOCK_N)
            top, total, acc = fold_tile(
                queries, top, total, acc, keys, values, pages, n, head, n < end, n < end, scale,
                HKV, D, BLOCK, PAGE, True,
            )  # fmt: skip
    for start in range(low, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        ago = position[:, None] - n[None, :]
        seen = (ago >= 0) & (ago < WINDOW) if WINDOW > 0 else ago >= 0
        top, total, acc = fold_tile(
            queries, top, total, acc, keys, values, pages, n, head, n < end, seen, scale,
            HKV, D, BLOCK, PAGE, False,
        )  # fmt: skip
    return top, total, acc


def _paged_prefill_kernel(  # type: ignore[no-untyped-def]
    q, sinks, keys, values, table, slots, query_starts, context_lens, out, num_rows,
    q_token, q_head, table_slot, scale, v_scale,
    GROUP: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one row, GROUP heads each: program tile * HKV + key head, counted from the
    last tiles, which have the most to read. (A grid's other axes end at 65535.)
    """
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    head = tl.program_id(0) % HKV
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // HKV
    row = _row_of_tile(query_starts, num_rows, tile, TOKENS)
    begin, stop = tl.load(query_starts + row), tl.load(query_starts + row + 1)
    begin_of_tile = begin + (tile - begin // TOKENS - row) * TOKENS
    if (begin_of_tile < begin) | (begin_of_tile >= stop):
        return
    length = tl.load(context_lens + row)
    pages = table + tl.load(slots + row).to(tl.int64) * table_slot
    m, d = tl.arange(0, M), tl.arange(0, BLOCK)
    token = begin_of_tile + m // GROUP
    is_query = (m < TOKENS * GROUP) & (token < stop)
    heads = head * GROUP + m % GROUP
    mask = is_query[:, None] & (d < D)[None, :]
    place = token.to(tl.int64) * q_token + heads * q_head
    queries = tl.load(q + place[:, None] + d[None, :], mask=mask, other=0.0)
    past = length - stop  # a token's index in the step, plus this, is its position
    first = past + begin_of_tile
    top, total, acc = _attend_tile(
        queries, past + token, first, tl.minimum(first + TOKENS, length),
        keys, values, pages, head, scale, HKV, D, WINDOW, PAGE, BLOCK_N,
    )  # fmt: skip
    result = finish(top, total, acc, sinks, heads, is_query, SINKS) * v_scale
    place = (token.to(tl.int64) * (HKV * GROUP) + heads) * D
    tl.store(out + place[:, None] + d[None, :], result.to(out.dtype.element_ty), mask=mask)


_kernel = jit(_paged_prefill_kernel, varying=("slots", "query_starts", "context_lens", "num_rows"))


def _shape(dtype: torch.dtype, group: int, block: int) -> dict[str, Any]:
    """Rows of a tile, cached tokens of a step, steps in flight and warps. Float32 products run
    without tensor cores and hold their operands in registers: small tiles.
    """
    if dtype == torch.float32:
        rows, kilobytes, stages, warps = 32, 16, 2, 4
    elif block > 128:
        rows, kilobytes, stages, warps = 128, 32, 2, 8
    else:
        rows, kilobytes, stages, warps = 128, 16, 3, 4
    rows = max(rows, block_of(group))
    tokens = min(128, tile_tokens(dtype, block, kilobytes))
    return {
        "TOKENS": rows // group, "M": rows, "BLOCK_N": tokens,
        "num_stages": stages, "num_warps": warps,
    }  # fmt: skip


def launch(
    q: Tensor,
    layer: PagedLayer,
    step: DeviceStep,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference`, into `out`, of which tokens of no row of the step are left alone."""
    num_kv_heads = layer.keys.shape[2]
    _, num_heads, size = q.shape
    assert_heads("paged_prefill", q, q[:, :num_kv_heads], q[:, :num_kv_heads], layer, step)
    assert_rows("paged_prefill", q, layer.keys)
    assert sinks is None or sinks.shape == (num_heads,), f"paged_prefill: sinks {sinks.shape}"
    group, block = num_heads // num_kv_heads, block_of(size)
    shape = _shape(q.dtype, group, block)
    tiles = step.num_tokens // shape["TOKENS"] + step.num_rows
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.shape == q.shape and out.is_contiguous(), f"paged_prefill: out {out.shape}"
    early = launches_early()
    _kernel[(num_kv_heads * tiles,)](
        q, q if sinks is None else sinks, layer.keys, layer.values, layer.table, step.slots,
        step.query_starts, step.context_lens, out, step.num_rows,
        *q.stride()[:2], layer.table.stride(0), layer.scale * layer.k_scale * LOG2_E, layer.v_scale,
        GROUP=group, HKV=num_kv_heads, D=size, SINKS=sinks is not None, WINDOW=layer.window,
        PAGE=layer.block_size, BLOCK=block, EARLY=early, **shape, launch_pdl=early,
    )  # fmt: skip
    return out
