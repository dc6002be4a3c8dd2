"""silu_mul(x w^T) in one kernel, for the hundreds and thousands of tokens of a prompt, on Hopper.

The library writes the product of a merged gate and up projection, twice as wide as what is wanted
of it, and another kernel reads it again. Here the gate is applied to sums that are still in
registers: a tile has some rows of w's first half (gate) and those of its second half (up) that
belong to them, side by side, so that a thread holds both sums of each pair.

As many programs as there are multiprocessors work through the tiles. In each, one warp fetches
blocks of x and w ahead (TMA, by way of a ring of buffers), and two groups of four warps, each with
half of the tile's tokens, multiply them. Nothing but the ring ties these two together: while one
is at its gate, the other has the matrix units for itself (CUTLASS calls a like scheme "pingpong").

T tokens, K columns, w [2 N, K]: out [T, N]. Rounding is that of `silu_mul` after a product.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.gluon_jit import (
    TensorDescriptor,
    fence_async_shared,
    gl,
    gluon_jit,
    mbarrier,
    num_multiprocessors,
    runs_gluon,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Tile

_ALIGNMENT = 16
"""In bytes: of operands, and of their rows' distances, as TMA wants it."""

_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}
_GROUP_TOKENS = 2048
"""Tiles of so many tokens are taken with one part of w before the next part: both stay in the
second cache meanwhile.
"""

_REGISTERS = 168
"""Of a thread, on average: those that multiply have 232 and more, those that fetch 24."""


@gluon_jit
def _tile_at(index, num_blocks, num_parts, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """(block of tokens, part of w) of a tile: GROUP blocks of tokens for each part."""
    group = index // (GROUP * num_parts)
    inside = index % (GROUP * num_parts)
    width = min(num_blocks - group * GROUP, GROUP)
    return group * GROUP + inside % width, inside // width


@gluon_jit
def _fetch(x, w, ring, tiles, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Keep the ring filled. Beyond the last token and column, TMA fills in zeros."""
    x_ring, w_ring, ready, free = ring
    num_blocks, num_parts = tiles
    STAGES: gl.constexpr = x_ring.type.shape[0]
    TOKENS: gl.constexpr = x_ring.type.shape[1]
    COLUMNS: gl.constexpr = x_ring.type.shape[2]
    ROWS: gl.constexpr = w_ring.type.shape[1] // 2
    num_rows = w.shape[0] // 2
    turn = 0
    for index in range(gl.program_id(0), num_blocks * num_parts, gl.num_programs(0)):
        block, part = _tile_at(index, num_blocks, num_parts, GROUP)
        for column in range(0, x.shape[1], COLUMNS):
            stage = turn % STAGES
            mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
            filled = ready.index(stage)
            mbarrier.expect(filled, x.block_type.nbytes + 2 * w.block_type.nbytes)
            tma.async_copy_global_to_shared(
                x, [block * TOKENS, column], filled, x_ring.index(stage)
            )
            gate = w_ring.index(stage).slice(0, ROWS)
            up = w_ring.index(stage).slice(ROWS, ROWS)
            tma.async_copy_global_to_shared(w, [part * ROWS, column], filled, gate)
            tma.async_copy_global_to_shared(w, [num_rows + part * ROWS, column], filled, up)
            turn += 1


@gluon_jit
def _multiply(  # type: ignore[no-untyped-def]
    out, out_halves, num_columns, ring, tiles, HALF: gl.constexpr, GROUP: gl.constexpr
):
    """The first (0) or second (1) half of each tile's tokens."""
    x_ring, w_ring, ready, free = ring
    num_blocks, num_parts = tiles
    STAGES: gl.constexpr = x_ring.type.shape[0]
    TOKENS: gl.constexpr = x_ring.type.shape[1] // 2
    COLUMNS: gl.constexpr = x_ring.type.shape[2]
    ROWS: gl.constexpr = w_ring.type.shape[1] // 2
    dtype: gl.constexpr = out.dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * ROWS, 16])
    buffer = out_halves.index(HALF)
    turn = 0
    for index in range(gl.program_id(0), num_blocks * num_parts, gl.num_programs(0)):
        block, part = _tile_at(index, num_blocks, num_parts, GROUP)
        sums = gl.zeros((TOKENS, 2 * ROWS), gl.float32, layout)
        for column in range(0, num_columns, COLUMNS):
            stage = turn % STAGES
            mbarrier.wait(ready.index(stage), turn // STAGES & 1)
            tokens = x_ring.index(stage).slice(HALF * TOKENS, TOKENS)
            rows = w_ring.index(stage).permute((1, 0))
            sums = warpgroup_mma(tokens, rows, sums, is_async=True)
            sums = warpgroup_mma_wait(1, (sums,))
            # The product before this one has ended: its buffers may be filled again.
            mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1, pred=column > 0)
            turn += 1
        sums = warpgroup_mma_wait(0, (sums,))
        mbarrier.arrive(free.index((turn + STAGES - 1) % STAGES), count=1)
        gate, up = sums.reshape([TOKENS, 2, ROWS]).permute(0, 2, 1).split()
        gate, up = gate.to(dtype).to(gl.float32), up.to(dtype).to(gl.float32)
        gate = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        tma.store_wait(0)
        buffer.store((gate * up).to(dtype))
        fence_async_shared()
        start = block * 2 * TOKENS + HALF * TOKENS
        tma.async_copy_shared_to_global(out, [start, part * ROWS], buffer)
    tma.store_wait(0)


@gluon_jit
def _gated_kernel(x, w, out, STAGES: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    TOKENS: gl.constexpr = x.block_type.shape[0]
    COLUMNS: gl.constexpr = x.block_type.shape[1]
    ROWS: gl.constexpr = w.block_type.shape[0]
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, TOKENS, COLUMNS], x.layout)
    w_ring = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * ROWS, COLUMNS], w.layout)
    out_halves = gl.allocate_shared_memory(x.dtype, [2, TOKENS // 2, ROWS], out.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    num_blocks, num_parts = gl.cdiv(x.shape[0], TOKENS), gl.cdiv(w.shape[0] // 2, ROWS)
    ring, tiles = (x_ring, w_ring, ready, free), (num_blocks, num_parts)
    gl.warp_specialize(
        [
            (_multiply, (out, out_halves, x.shape[1], ring, tiles, 0, GROUP)),
            (_multiply, (out, out_halves, x.shape[1], ring, tiles, 1, GROUP)),
            (_fetch, (x, w, ring, tiles, GROUP)),
        ],
        [4, 1],  # warps, and registers of a thread, of those after the first
        [232, 24],
    )


def serves(call: LinearCall) -> bool:
    """Can this kernel compute `call` here?"""
    x, w = call.x, call.w
    if not call.gate or call.norm is not None or x.dtype not in _DTYPES or not runs_gluon(x.device):
        return False
    size = x.dtype.itemsize
    places = (x.data_ptr(), w.data_ptr(), x.stride(0) * size, w.stride(0) * size)
    return not any(place % _ALIGNMENT for place in (*places, call.num_rows * size))


def launch(call: LinearCall, tile: Tile, compile_only: bool = False) -> Tensor:
    """For a call that it `serves`."""
    x, w, num_tokens, num_rows = call.x, call.w, call.x.shape[0], call.num_rows
    out = torch.empty(num_tokens, num_rows, dtype=x.dtype, device=x.device)
    num_tiles = -(-num_tokens // tile.tokens) * -(-num_rows // tile.rows)
    _gated_kernel.run(
        _described(x, tile.tokens, tile.size),
        _described(w, tile.rows, tile.size),
        _described(out, tile.tokens // 2, tile.rows),
        STAGES=tile.stages, GROUP=max(1, _GROUP_TOKENS // tile.tokens),
        num_warps=4, maxnreg=_REGISTERS,
        grid=(min(num_tiles, num_multiprocessors(x.device)),), warmup=compile_only,
    )  # fmt: skip
    return out


def _described(matrix: Tensor, rows: int, columns: int) -> Any:
    """A matrix that is read or written in blocks."""
    layout = _layout(rows, columns, _DTYPES[matrix.dtype])
    return TensorDescriptor.from_tensor(matrix, [rows, columns], layout)


@functools.cache
def _layout(rows: int, columns: int, dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for([rows, columns], getattr(gl, dtype))
