"""The blocks of queries, keys and values that a program of `hopper_prefill` works on: which they
are, and how they come.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.gluon_jit import TensorDescriptor, gl, gluon_jit, mbarrier, tma

BLOCK = 128
"""Queries of an item, keys of a block, and elements of a head."""

DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}

_ALIGNMENT = 16
"""In bytes: of operands, and of the distances of their tokens, as TMA wants it."""

_FAR = 1 << 30
"""See `described`."""


@gluon_jit
def _place(i):  # type: ignore[no-untyped-def]
    """Of this program's item i among the i-th items of all: from left to right and back again, so
    that who got the longest item of one round gets the shortest of the next.
    """
    program, last = gl.program_id(0), gl.num_programs(0) - 1
    return gl.where(i % 2 == 0, program, last - program)


@gluon_jit
def num_items_of(num_blocks, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Of this program: one at least, as there are no more programs than items."""
    rounds = num_blocks * HEADS // gl.num_programs(0)
    return rounds + gl.where(_place(rounds) < num_blocks * HEADS % gl.num_programs(0), 1, 0)


@gluon_jit
def item_of(blocks, i, HEADS: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first query in its sequence, the sequence's length, its end among all tokens, head)."""
    index = i * gl.num_programs(0) + _place(i)
    at = blocks + 3 * (index // HEADS)
    return gl.load(at), gl.load(at + 1), gl.load(at + 2), index % HEADS


@gluon_jit
def wait_filled(ring, turn, pred):  # type: ignore[no-untyped-def]
    buffers, filled, _ = ring
    STAGES: gl.constexpr = buffers.type.shape[0]
    mbarrier.wait(filled.index(turn % STAGES), turn // STAGES & 1, pred=pred)


@gluon_jit
def let_go(ring, turn):  # type: ignore[no-untyped-def]
    """The ring's place of `turn` may be filled anew, as far as these warps are concerned."""
    buffers, _, free = ring
    mbarrier.arrive(free.index(turn % buffers.type.shape[0]), count=1)


@gluon_jit
def rows_of(ring, turn):  # type: ignore[no-untyped-def]
    """[rows, head size] in the ring's place of `turn`."""
    buffers = ring[0]
    STAGES: gl.constexpr = buffers.type.shape[0]
    return buffers.index(turn % STAGES).reshape([buffers.type.shape[3], buffers.type.shape[4]])


@gluon_jit
def _fill(matrix, ring, turn, row, length, end, column):  # type: ignore[no-untyped-def]
    """With rows of a sequence, from `row` on, as soon as the place is free."""
    buffers, filled, free = ring
    STAGES: gl.constexpr = buffers.type.shape[0]
    stage = turn % STAGES
    mbarrier.wait(free.index(stage), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(filled.index(stage), matrix.block_type.nbytes)
    far = matrix.shape[2]
    tma.async_copy_global_to_shared(
        matrix, [far, end, far - length + row, column], filled.index(stage), buffers.index(stage)
    )


@gluon_jit
def fetch(operands, head_sizes, rings, work, HEADS: gl.constexpr, GROUP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Keep the rings filled. Values are wanted one step after their keys."""
    q, k, v = operands
    q_head, k_head, v_head = head_sizes
    q_ring, k_ring, v_ring = rings
    blocks, num_blocks = work
    KEYS: gl.constexpr = k.block_type.shape[2]
    turn = 0
    v_row, v_length, v_end, v_column = 0, 0, 0, 0
    for i in range(num_items_of(num_blocks, HEADS)):
        row, length, end, head = item_of(blocks, i, HEADS)
        _fill(q, q_ring, i, row, length, end, head * q_head)
        for block in range(row // KEYS, -1, -1):
            _fill(k, k_ring, turn, block * KEYS, length, end, head // GROUP * k_head)
            if turn > 0:
                _fill(v, v_ring, turn - 1, v_row, v_length, v_end, v_column)
            v_row, v_length, v_end, v_column = block * KEYS, length, end, head // GROUP * v_head
            turn += 1
    _fill(v, v_ring, turn - 1, v_row, v_length, v_end, v_column)


@gluon_jit
def ring_of(STAGES: gl.constexpr, matrix):  # type: ignore[no-untyped-def]
    """(buffers for blocks of `matrix`, barriers of those that are filled, and of those free)."""
    shape: gl.constexpr = matrix.block_type.shape
    buffers = gl.allocate_shared_memory(
        matrix.dtype, [STAGES, 1, 1, shape[2], shape[3]], matrix.layout
    )
    filled = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(filled.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    return buffers, filled, free


def described(x: Tensor, rows: int) -> Any:
    """x [T, H, 128], read or written in blocks of `rows` tokens of one head, so that TMA stops at
    the end of any sequence: at (2^30, end, 2^30 - length + row, column) are the rows from `row` on
    of the `length` ones before token `end`. The third coordinate reaches its bound where they end;
    the first takes its 2^30 tokens back, as addresses are counted modulo 2^64 bytes (a trick of
    `triton.tools.ragged_tma`).
    """
    step, place = x.stride(0), x.data_ptr()
    is_aligned = place % _ALIGNMENT == step * x.element_size() % _ALIGNMENT == 0
    assert x.stride(2) == 1 and is_aligned, (
        f"prefill: TMA does not read strides {x.stride()} of {x.dtype} at {place:#x}"
    )
    num_columns = (x.shape[1] - 1) * x.stride(1) + BLOCK
    shape = [2 * _FAR - 1, 2 * _FAR - 1, _FAR, num_columns]
    # 2^64 bytes are 2^30 times 2^34 elements of two bytes.
    strides = [(1 << 34) - step, step, step, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, rows, BLOCK], _layout(rows, DTYPES[x.dtype]))


@functools.cache
def _layout(rows: int, dtype: str) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, BLOCK], getattr(gl, dtype))
