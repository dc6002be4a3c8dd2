"""A linear layer for a few to a few hundred tokens, on matrix units, that streams its weight.

The weight is the product's left side, its many rows the matrix unit's tall dimension, and tokens
the short one: out^T = w x^T. Few rows would leave multiprocessors idle, so several programs may
share the columns of one tile: each writes its part, and the one that comes last adds them all up,
in order, so that a result never depends on who that was.

T tokens, K columns, N rows of out. Rounding is that of `linear.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.linear_parts import LinearCall, finish_tile
from tokenspeed.kernels.linear_tiles import Tile
from tokenspeed.kernels.triton_jit import gdc, jit, launches_early, tl

_EARLY_BYTES = 16 << 20
"""The largest weight whose kernel begins before the one in front has ended. With larger ones it
makes a layer slower (111 to 130 us in Qwen3-8B at 16 tokens, but 25.6 to 22.5 in Qwen3-0.6B):
programs that come early seem to crowd on the multiprocessors that are free by then.
"""

_MAX_TILES = 1 << 16
_arrivals: dict[torch.device, Tensor] = {}
"""For each device: how many programs have left their part of a tile, all 0 between launches.

Launches that share it must not overlap. They do not: a model runs on one stream, and a kernel that
begins early waits for the one in front before it counts.
"""


def _skinny_kernel(  # type: ignore[no-untyped-def]
    x, norm, w, bias, residual, out, parts, arrived, num_tokens, x_stride, residual_stride,
    N, K, span, splits, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, NORM: tl.constexpr,
    GATE: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_N rows of w (and, with GATE, as many of its second half), BLOCK_T tokens, `span`
    columns from split * span on. What lies beyond N and T repeats the last, and is not stored.
    """
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = (tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    split = tl.program_id(2)
    row_start = w + tl.minimum(row, N - 1).to(tl.int64)[:, None] * K
    up_start = row_start + N.to(tl.int64) * K
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    x_start = x + tl.minimum(token, num_tokens - 1) * x_stride
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up = total
    for first in range(split * span, tl.minimum(split * span + span, K), BLOCK_K):
        column = first + tl.arange(0, BLOCK_K)
        if EVEN:
            weight = tl.load(row_start + column[None, :])
            part = tl.load(x_start[None, :] + column[:, None])
        else:
            dense = column < K
            weight = tl.load(row_start + column[None, :], mask=dense[None, :], other=0.0)
            part = tl.load(x_start[None, :] + column[:, None], mask=dense[:, None], other=0.0)
        total = tl.dot(weight, part, total, input_precision="ieee")
        if GATE:
            if EVEN:
                other = tl.load(up_start + column[None, :])
            else:
                other = tl.load(up_start + column[None, :], mask=dense[None, :], other=0.0)
            up = tl.dot(other, part, up, input_precision="ieee")

    is_last = True
    if SPLIT:
        total, up, is_last = _gather(total, up, parts, arrived, splits, BLOCK_T, BLOCK_N, GATE)
    if is_last:
        mask = (row < N)[:, None] & (token < num_tokens)[None, :]
        done = finish_tile(
            total, up, bias + row[:, None] + tl.zeros([1, BLOCK_T], tl.int32),
            residual + token[None, :] * residual_stride + row[:, None], mask,
            out.dtype.element_ty, GATE, BIAS, ADD,
        )  # fmt: skip
        tl.store(out + token[None, :] * N + row[:, None], done, mask=mask)


@jit
def _gather(  # type: ignore[no-untyped-def]
    total, up, parts, arrived, splits,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, GATE: tl.constexpr,
):  # fmt: skip
    """Leave this program's sums in `parts` [tile, split, gate or up, BLOCK_N, BLOCK_T]. For the
    last to do so: all of the tile's, added in order.
    """
    tile = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    inner = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    size: tl.constexpr = BLOCK_N * BLOCK_T
    each: tl.constexpr = 2 * size if GATE else size
    start = parts + tile.to(tl.int64) * (splits * each) + inner
    mine = start + tl.program_id(2) * each
    tl.store(mine, total)
    if GATE:
        tl.store(mine + size, up)
    tl.debug_barrier()  # the count says that the whole program's part is there
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == splits - 1
    if is_last:
        tl.store(arrived + tile, 0)
        total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
        up = total
        for split in range(splits):  # past the first cache, which may hold older values
            total += tl.load(start + split * each, cache_modifier=".cg")
            if GATE:
                up += tl.load(start + split * each + size, cache_modifier=".cg")
    return total, up, is_last


_kernel = jit(_skinny_kernel, varying=("num_tokens", "splits"))


def launch(call: LinearCall, tile: Tile, compile_only: bool = False) -> Tensor:
    (num_tokens, size), device = call.x.shape, call.x.device
    assert call.norm is None, "skinny: normed rows come from a kernel of their own"
    out = torch.empty(num_tokens, call.num_rows, dtype=call.x.dtype, device=device)
    block_t = min(tile.tokens, max(16, 1 << (num_tokens - 1).bit_length()))
    num_blocks, num_groups = -(-call.num_rows // tile.rows), -(-num_tokens // block_t)
    span = -(-size // (tile.size * tile.splits)) * tile.size
    splits = -(-size // span)
    early = launches_early() and call.w.nbytes <= _EARLY_BYTES
    parts, arrived = out, out
    if splits > 1:
        num_sums = num_blocks * num_groups * splits * (2 if call.gate else 1)
        parts = torch.empty(num_sums * tile.rows * block_t, dtype=torch.float32, device=device)
        arrived = _arrivals_on(device, num_blocks * num_groups)
    _kernel.run(
        *call.operands(out), parts, arrived, num_tokens, *call.strides(), call.num_rows,
        size, span, splits, BLOCK_T=block_t, BLOCK_N=tile.rows, BLOCK_K=tile.size, SPLIT=splits > 1,
        EVEN=size % tile.size == 0, **call.flags(),
        EARLY=early, num_warps=tile.warps, num_stages=tile.stages, launch_pdl=early,
        grid=(num_blocks, num_groups, splits), warmup=compile_only,
    )  # fmt: skip
    return out


def _arrivals_on(device: torch.device, num_tiles: int) -> Tensor:
    assert num_tiles <= _MAX_TILES, f"{num_tiles} tiles share their columns: more than is useful"
    if device not in _arrivals:
        # Memory of a CUDA graph that is being captured is not 0 before its first replay.
        assert device.type == "cpu" or not torch.cuda.is_current_stream_capturing()
        _arrivals[device] = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)
    return _arrivals[device]
