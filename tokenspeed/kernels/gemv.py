"""A linear layer for one to a few tokens: rows of the weight times a token, on vector units.

A program has one token. Neighbours have the others, and find the same rows in the cache. The weight
does not depend on the kernel in front: it is on its way before the program waits for that kernel's
x (programmatic dependent launch). Two ways through it:

    whole    rows of w are read at once, and x stays in registers, normed if it has to be, for all
             of the program's tiles; the next tile is read while one is summed
    chunks   a chunk of columns at a time, for long rows

K columns, N rows of out. Rounding is that of `linear.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.linear_parts import LinearCall, finish_tile, norm_row
from tokenspeed.kernels.linear_tiles import Tile
from tokenspeed.kernels.triton_jit import block_of, gdc, jit, launches_early, tl

MAX_WHOLE = 8192
"""Elements of a row that registers hold."""


@jit
def _whole_rows(  # type: ignore[no-untyped-def]
    start, row, N, K, BLOCK_K: tl.constexpr
):
    """Rows of w, 0 where there is none."""
    column = tl.arange(0, BLOCK_K)
    mask = (row < N)[:, None] & (column < K)[None, :]
    return tl.load(start + row.to(tl.int64)[:, None] * K + column[None, :], mask=mask, other=0.0)


@jit
def _sum_of_chunks(  # type: ignore[no-untyped-def]
    start, x, row, N, K, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Rows of w times x."""
    total = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    start += tl.minimum(row, N - 1).to(tl.int64)[:, None] * K
    for first in tl.range(0, K, BLOCK_K, loop_unroll_factor=4):  # several reads are under way
        column = first + tl.arange(0, BLOCK_K)
        weight = tl.load(start + column[None, :], mask=(column < K)[None, :], other=0.0)
        part = tl.load(x + column, mask=column < K, other=0.0)
        total += weight.to(tl.float32) * part.to(tl.float32)[None, :]
    return tl.sum(total, axis=1)


def _whole_rows_kernel(  # type: ignore[no-untyped-def]
    x, norm, w, bias, residual, out, num_tokens, x_stride, residual_stride, eps, N, K, num_tiles,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, GATE: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`num_tiles` times BLOCK_N rows of w and, with GATE, as many of its second half."""
    column = tl.arange(0, BLOCK_K)
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    x, residual, out = x + token * x_stride, residual + token * residual_stride, out + token * N
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) // num_tokens * num_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
    up_start = w + N.to(tl.int64) * K
    weight = _whole_rows(w, row, N, K, BLOCK_K)
    other = weight
    if GATE:
        other = _whole_rows(up_start, row, N, K, BLOCK_K)
    scale = column
    if NORM:
        scale = tl.load(norm + column, mask=column < K, other=0.0)
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    part = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
    if NORM:
        part = norm_row(part, scale, eps, K, dtype)
    for left in range(num_tiles, 0, -1):
        coming = tl.where(left > 1, row + BLOCK_N, N)
        next_weight = _whole_rows(w, coming, N, K, BLOCK_K)
        next_other = next_weight
        if GATE:
            next_other = _whole_rows(up_start, coming, N, K, BLOCK_K)
        total = tl.sum(weight.to(tl.float32) * part[None, :], axis=1)
        up = total
        if GATE:
            up = tl.sum(other.to(tl.float32) * part[None, :], axis=1)
        done = finish_tile(total, up, bias + row, residual + row, row < N, dtype, GATE, BIAS, ADD)
        tl.store(out + row, done, mask=row < N)
        row, weight, other = coming, next_weight, next_other


def _chunks_kernel(  # type: ignore[no-untyped-def]
    x, norm, w, bias, residual, out, num_tokens, x_stride, residual_stride, eps, N, K, num_tiles,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of w and, with GATE, as many of its second half. No norm, one tile."""
    token = (tl.program_id(0) % num_tokens).to(tl.int64)
    x, residual, out = x + token * x_stride, residual + token * residual_stride, out + token * N
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0) // num_tokens * BLOCK_N + tl.arange(0, BLOCK_N)
    up_start = w + N.to(tl.int64) * K
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    total = _sum_of_chunks(w, x, row, N, K, BLOCK_N, BLOCK_K)
    up = total
    if GATE:
        up = _sum_of_chunks(up_start, x, row, N, K, BLOCK_N, BLOCK_K)
    done = finish_tile(total, up, bias + row, residual + row, row < N, dtype, GATE, BIAS, ADD)
    tl.store(out + row, done, mask=row < N)


_VARYING = ("num_tokens", "num_tiles")
_whole_kernel = jit(_whole_rows_kernel, varying=_VARYING)
_chunk_kernel = jit(_chunks_kernel, varying=_VARYING)


def launch(call: LinearCall, tile: Tile, compile_only: bool = False) -> Tensor:
    num_tokens, size = call.x.shape
    out = torch.empty(num_tokens, call.num_rows, dtype=call.x.dtype, device=call.x.device)
    early, block_k = launches_early(), min(tile.size, block_of(size))
    if block_k >= size:
        kernel, num_tiles = _whole_kernel, tile.repeats
        assert size <= MAX_WHOLE, f"gemv: rows of {size} do not fit into registers"
    else:
        kernel, num_tiles = _chunk_kernel, 1
        assert call.norm is None, f"gemv: a norm of {size} elements by chunks of {block_k}"
    kernel.run(
        *call.operands(out), num_tokens, *call.strides(), call.eps, call.num_rows, size, num_tiles,
        BLOCK_N=tile.rows, BLOCK_K=block_k, **call.flags(), EARLY=early,
        num_warps=tile.warps, launch_pdl=early, warmup=compile_only,
        grid=(num_tokens * -(-call.num_rows // (tile.rows * num_tiles)),),
    )  # fmt: skip
    return out
