"""`paged_decode`: one token of each row over its pages; prologue and store in the same launch.

Nothing is planned: lengths and pages are read on the device. A row's context is divided among the
programs of a third grid axis, whose number is fixed by the batch and the longest context possible;
of a shorter context's programs those without a share leave at once. The last program to end merges
the others' partial results.

The row's own token never comes from the cache: the first program starts its softmax with k and v in
registers, rounded as they are stored, and stores them for the steps to come. Shapes: q [B, Hq, D],
k and v [B, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels import kv_store
from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.head_prologue import operands_of, prepared_heads
from tokenspeed.kernels.kv_dtype import limit_of, narrowed
from tokenspeed.kernels.paged_layer import PagedLayer, assert_heads, paged_attention_reference
from tokenspeed.kernels.paged_tiles import LOG2_E, finish, fold_tile, tile_tokens
from tokenspeed.kernels.triton_jit import assert_rows, block_of, gdc, jit, launches_early, tl

_PROGRAMS = 132
"""One for each multiprocessor of a Hopper GPU: batches with fewer (row, key head) pairs are split.
"""

_MIN_SHARE = 64
"""Tokens of a program: less does not pay for the merge."""

_MAX_SPLITS = 64

_FEW_PAIRS, _MANY_PAIRS = 16, 1024
"""Of a row and a key head: a row or two; and so many that multiprocessors get eight or more."""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: PagedLayer,
    step: DeviceStep,
    sinks: Tensor | None = None,
    prologue: Prologue | None = None,
) -> Tensor:
    q = kv_store.reference(q, k, v, layer, step, prologue)
    return paged_attention_reference(q, layer, step, sinks)


@dataclass(frozen=True)
class Workspace:
    """Partial results of split rows. Their number has a bound that no batch exceeds, so it is made
    once; launches that share it must follow each other on one stream.
    """

    sums: Tensor
    """float32 [programs, query heads of a key head, D]."""
    stats: Tensor
    """float32 [programs, query heads of a key head, 2]: maximum and denominator."""
    arrived: Tensor
    """int32 [programs]: how many programs of a row and head have ended; 0 between launches."""


def workspace_for(group: int, size: int, device: torch.device) -> Workspace:
    """For heads of `size`, `group` of which share a key head."""
    programs = 2 * _PROGRAMS
    return Workspace(
        torch.empty(programs, group, size, dtype=torch.float32, device=device),
        torch.empty(programs, group, 2, dtype=torch.float32, device=device),
        torch.zeros(programs, dtype=torch.int32, device=device),
    )


def num_splits(num_pairs: int, max_context_len: int) -> int:
    """Programs for each of `num_pairs` pairs of a row and a key head: they fill the device."""
    wanted = -(-_PROGRAMS // num_pairs)
    return max(1, min(wanted, _MAX_SPLITS, -(-max_context_len // _MIN_SHARE)))


@jit
def _start_with_own_token(  # type: ignore[no-untyped-def]
    queries, total, acc, k, v, keys, values, pages, last, head, weight, cos, sin, eps, scale,
    k_inverse, v_inverse,
    HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """The softmax over token `last` alone, whose k and v are stored in the row's last page."""
    one, d = tl.arange(0, 1), tl.arange(0, BLOCK)
    new_k = prepared_heads(k + one, one == 0, weight, cos, sin, eps, D, HALF, BLOCK, NORM, ROPE)
    new_v = tl.load(v + d, mask=d < D, other=0.0)[None, :]
    if LIMIT > 0:
        new_k = narrowed(new_k, k_inverse, keys, LIMIT)
        new_v = narrowed(new_v, v_inverse, values, LIMIT)
    place = tl.load(pages + last // PAGE).to(tl.int64) * PAGE + last % PAGE
    place = (place * (HKV * D) + head * D + d)[None, :]
    tl.store(keys + place, new_k, mask=(d < D)[None, :])
    tl.store(values + place, new_v, mask=(d < D)[None, :])
    top = tl.sum(queries.to(tl.float32) * new_k.to(tl.float32), axis=1) * scale
    return top, total + 1.0, acc + new_v.to(tl.float32)


@jit
def _keep(  # type: ignore[no-untyped-def]
    sums, stats, program, top, total, acc, GROUP: tl.constexpr, D: tl.constexpr
):
    """Write a partial result."""
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    row = program * GROUP + g
    tl.store(stats + row * 2, top, mask=g < GROUP)
    tl.store(stats + row * 2 + 1, total, mask=g < GROUP)
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(sums + row[:, None] * D + d[None, :], acc, mask=mask)


@jit
def _merge(  # type: ignore[no-untyped-def]
    sums, stats, first, used, acc, GROUP: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr
):
    """The softmax of `used` <= MAX_SPLITS partial results, from L2, where other multiprocessors
    left them; `acc` only gives its shape.
    """
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    split = tl.arange(0, MAX_SPLITS)
    at = ((first + split[:, None]) * GROUP + g[None, :]) * 2
    there = (split < used)[:, None] & (g < GROUP)[None, :]
    tops = tl.load(stats + at, mask=there, other=-1e30, cache_modifier=".cg")
    totals = tl.load(stats + at + 1, mask=there, other=0.0, cache_modifier=".cg")
    top = tl.max(tops, axis=0)
    total = tl.sum(totals * tl.exp2(tops - top[None, :]), axis=0)
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    acc = tl.zeros_like(acc)
    for each in tl.range(0, used, loop_unroll_factor=4):
        row = (first + each) * GROUP + g
        own_top = tl.load(stats + row * 2, mask=g < GROUP, other=-1e30, cache_modifier=".cg")
        place = sums + row[:, None] * D + d[None, :]
        part = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
        acc += part * tl.exp2(own_top - top)[:, None]
    return top, total, acc


@jit
def _combine(  # type: ignore[no-untyped-def]
    sums, stats, arrived, pair, used, top, total, acc,
    GROUP: tl.constexpr, D: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Leave a partial result for the program that comes last, or, as that program, take all."""
    first = pair * tl.num_programs(2)
    _keep(sums, stats, first + tl.program_id(2), top, total, acc, GROUP, D)
    tl.debug_barrier()  # every thread's part is written before the program counts as arrived
    is_last = tl.atomic_add(arrived + pair, 1, sem="acq_rel") == used - 1
    if is_last:
        tl.store(arrived + pair, 0)
        top, total, acc = _merge(sums, stats, first, used, acc, GROUP, D, MAX_SPLITS)
    return is_last, top, total, acc


@jit
def _write(  # type: ignore[no-untyped-def]
    out, sinks, pair, head, top, total, acc, v_scale, GROUP: tl.constexpr, D: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Write the result of a row and key head."""
    g, d = tl.arange(0, acc.shape[0]), tl.arange(0, acc.shape[1])
    result = finish(top, total, acc, sinks, head * GROUP + g, g < GROUP, SINKS) * v_scale
    place = (pair * GROUP + g)[:, None] * D + d[None, :]
    mask = (g < GROUP)[:, None] & (d < D)[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=mask)


@jit
def _share(context_lens, row, WINDOW: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SHARE: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's last token, the cached ones [begin, end) of this program, and how many programs
    have some.
    """
    last = tl.load(context_lens + row) - 1
    low = 0
    if WINDOW > 0:
        low = tl.maximum(last - WINDOW + 1, 0)
    share = tl.cdiv(tl.cdiv(last - low, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    share = tl.maximum(share, MIN_SHARE)
    begin = low + tl.program_id(2) * share
    return last, begin, tl.minimum(begin + share, last), tl.maximum(tl.cdiv(last - low, share), 1)


def _paged_decode_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_weight, k_weight, cos, sin, sinks, keys, values, table, slots, context_lens, out,
    sums, stats, arrived, q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token,
    table_slot, eps, scale, k_inverse, v_inverse, v_scale, GROUP: tl.constexpr, HKV: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr,
    SINKS: tl.constexpr, WINDOW: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    BLOCK: tl.constexpr, BLOCK_N: tl.constexpr, MIN_SHARE: tl.constexpr, SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The query heads of one key head of one row over a share of its context: program (key head,
    row, split). `scale` is in units of log2, as all scores are, and holds that of cached keys.
    LIMIT: of numbers in pages of another dtype (0: they are as k and v are).
    """
    head, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    pages = table + tl.load(slots + row).to(tl.int64) * table_slot
    last, begin, end, used = _share(context_lens, row, WINDOW, BLOCK_N, MIN_SHARE)
    if split >= used:
        return
    if EARLY:  # the kernel in front makes q, k and v; lengths and tables are older than that
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    g = tl.arange(0, M)
    cos, sin = cos + row * cos_token, sin + row * sin_token
    queries = prepared_heads(
        q + row * q_token + (head * GROUP + g) * q_head, g < GROUP, q_weight, cos, sin, eps,
        D, HALF, BLOCK, NORM, ROPE,
    )  # fmt: skip
    top, total = tl.full([M], -1e30, tl.float32), tl.zeros([M], tl.float32)
    acc = tl.zeros([M, BLOCK], tl.float32)
    if split == 0:
        top, total, acc = _start_with_own_token(
            queries, total, acc, k + row * k_token + head * k_head,
            v + row * v_token + head * v_head, keys, values, pages, last, head,
            k_weight, cos, sin, eps, scale, k_inverse, v_inverse, HKV, D, HALF, BLOCK, NORM, ROPE,
            PAGE, LIMIT,
        )  # fmt: skip
    for start in range(begin, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        top, total, acc = fold_tile(
            queries, top, total, acc, keys, values, pages, n, head, n < end, (n < end)[None, :],
            scale, HKV, D, BLOCK, PAGE, False,
        )  # fmt: skip
    pair, is_last = row * HKV + head, used == 1
    if SPLIT:
        if used > 1:
            is_last, top, total, acc = _combine(
                sums, stats, arrived, pair, used, top, total, acc, GROUP, D, MAX_SPLITS
            )
    if is_last:
        _write(out, sinks, pair, head, top, total, acc, v_scale, GROUP, D, SINKS)


_kernel = jit(_paged_decode_kernel, varying=("slots", "context_lens"))


def _shape(dtype: torch.dtype, block: int, num_pairs: int, splits: int) -> dict[str, int]:
    """Cached tokens of a tile, tiles in flight, and warps, as an H200 wants them for heads of 128:
    a batch that fills the device wants several programs on a multiprocessor, the more the larger it
    is (256 rows of 192, 512 and 1152 tokens: 70 to 62 us, 146 to 136 and 293 to 286), one that is
    split much in flight in a single one, and a lone row short steps.
    """
    if num_pairs >= _MANY_PAIRS:
        kilobytes, stages, warps = 8, 2, 2
    elif splits == 1:
        kilobytes, stages, warps = 16, 3, 4
    elif num_pairs > _FEW_PAIRS:
        kilobytes, stages, warps = 32, 3, 4
    else:
        kilobytes, stages, warps = 16, 2, 8
    tokens = tile_tokens(dtype, block, kilobytes)
    return {"BLOCK_N": tokens, "num_stages": stages, "num_warps": warps}


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: PagedLayer,
    step: DeviceStep,
    workspace: Workspace,
    sinks: Tensor | None = None,
    prologue: Prologue | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As `reference`: k and v are in the cache after it, the result is `out` [T, Hq, D]. Rows of it
    behind the step's are left alone.
    """
    assert step.max_query_len == 1, "paged_decode takes one token of each row"
    assert_heads("paged_decode", q, k, v, layer, step)
    assert_rows("paged_decode", q, k, v, layer.keys)
    (_, num_heads, size), num_kv_heads = q.shape, k.shape[1]
    group, block = num_heads // num_kv_heads, block_of(size)
    assert workspace.sums.shape[1:] == (group, size), "a workspace of other heads"
    assert sinks is None or sinks.shape == (num_heads,), f"paged_decode: sinks {sinks.shape}"
    operands = operands_of("paged_decode", q, prologue)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    assert out.shape == q.shape and out.is_contiguous(), f"paged_decode: out {out.shape}"
    early = launches_early()
    num_pairs = step.num_rows * num_kv_heads
    splits = num_splits(num_pairs, step.max_context_len)
    _kernel[num_kv_heads, step.num_rows, splits](
        q, k, v, *operands[:4], q if sinks is None else sinks, layer.keys, layer.values,
        layer.table, step.slots, step.context_lens, out,
        workspace.sums, workspace.stats, workspace.arrived,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        operands.cos_token, operands.sin_token, layer.table.stride(0), operands.eps,
        layer.scale * layer.k_scale * LOG2_E, 1 / layer.k_scale, 1 / layer.v_scale, layer.v_scale,
        GROUP=group, HKV=num_kv_heads, D=size, SINKS=sinks is not None, WINDOW=layer.window,
        PAGE=layer.block_size, M=max(16, block_of(group)), BLOCK=block,
        MIN_SHARE=_MIN_SHARE, SPLIT=splits > 1, MAX_SPLITS=_MAX_SPLITS, EARLY=early,
        LIMIT=limit_of(layer.keys.dtype) if layer.converts(k.dtype) else 0.0,
        **operands.flags, **_shape(q.dtype, block, num_pairs, splits), launch_pdl=early,
    )  # fmt: skip
    return out
