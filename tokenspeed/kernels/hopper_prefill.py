"""Causal attention of whole sequences to their own keys, for prompts, on Hopper.

The scheme is that of FlashAttention-3 (Shah et al. 2024): what multiplies and what fetches are
warps of their own, and the softmax of one block of scores is taken while the matrix units are at
work on another. Work comes as items: 128 queries of a sequence and one of its heads. As many
programs as there are multiprocessors work through them, the longest first. In each, one warp
fetches queries, and blocks of 128 keys and values from the diagonal down (TMA, by way of rings of
buffers), and two groups of four warps attend with 64 of the queries each. While a group makes
weights of its scores, its product of the weights before with their values is running. That goes on
from item to item: the last values of one are multiplied beside the first scores of the next.

Sequences lie behind one another, and TMA knows the end of each (`described`): rows beyond it are
read as zeros and never written. So blocks need no mask of lengths, and what lies behind a sequence
(NaN, or nothing at all) cannot get in. Only the block on the diagonal is masked, by the causal
rule.

T tokens, Hq and Hkv heads of 128: q [T, Hq, 128], k and v [T, Hkv, 128] -> out [T, Hq, 128].
"""

from __future__ import annotations

import math

from torch import Tensor

from tokenspeed.kernels.gluon_jit import (
    fence_async_shared,
    gl,
    gluon_jit,
    num_multiprocessors,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tokenspeed.kernels.hopper_blocks import (
    BLOCK,
    described,
    fetch,
    item_of,
    let_go,
    num_items_of,
    ring_of,
    rows_of,
    wait_filled,
)

_REGISTERS = 168
"""Of a thread, on average: those that attend have 240, those that fetch 24."""

_STAGES = 2
"""Of each ring. That of queries cannot do with one: an item's are held until the next has begun."""


@gluon_jit
def _tops(scores):  # type: ignore[no-untyped-def]
    """The greatest of each row, by pairs first: one after the other they would be a long chain."""
    ROWS: gl.constexpr = scores.shape[0]
    pairs = scores.reshape([ROWS, 2, scores.shape[1] // 16, 4, 2])
    top = gl.max(gl.max(gl.max(gl.max(pairs, axis=4), axis=2), axis=1), axis=1)
    return gl.convert_layout(top, gl.SliceLayout(1, scores.type.layout), assert_trivial=True)


@gluon_jit
def _sums(weights):  # type: ignore[no-untyped-def]
    """Of each row, what each of the four threads that share it has of it."""
    parts = weights.reshape([weights.shape[0], weights.shape[1] // 8, 4, 2])
    return gl.sum(gl.sum(parts, axis=3), axis=1)


@gluon_jit
def _by_rows(values, factors):  # type: ignore[no-untyped-def]
    """values times each row's factor."""
    layout: gl.constexpr = gl.SliceLayout(1, values.type.layout)
    factors = gl.convert_layout(factors, layout, assert_trivial=True)
    return values * gl.expand_dims(factors, 1)


@gluon_jit
def _weights(scores, top, scale):  # type: ignore[no-untyped-def]
    """2^(scale (scores - top)): one multiplication and subtraction at once, and one exponential."""
    return gl.exp2(scores * scale - gl.expand_dims(top * scale, 1))


@gluon_jit
def _operand(weights, dtype: gl.constexpr, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """As a product takes them: from registers, where they are already as it wants them."""
    kind: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    return gl.convert_layout(weights.to(dtype), kind, assert_trivial=True)


@gluon_jit
def _scores(queries, keys, layout: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin the product."""
    ROWS: gl.constexpr = queries.shape[0]
    KEYS: gl.constexpr = keys.shape[0]
    zeros = gl.zeros((ROWS, KEYS), gl.float32, layout)
    return warpgroup_mma(queries, keys.permute((1, 0)), zeros, is_async=True, use_acc=False)


@gluon_jit
def _diagonal_scores(rings, i, turn, layout: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """Begin those of item i's first block; for the upper half of its queries, only with as many of
    its keys as they may see.
    """
    q_ring, k_ring, _ = rings
    ROWS: gl.constexpr = q_ring[0].type.shape[3] // 2
    WIDTH: gl.constexpr = (HALF + 1) * ROWS
    queries = rows_of(q_ring, i).slice(HALF * ROWS, ROWS)
    return _scores(queries, rows_of(k_ring, turn).slice(0, WIDTH), layout)


@gluon_jit
def _diagonal_weights(  # type: ignore[no-untyped-def]
    scores, scale, narrow: gl.constexpr, layout: gl.constexpr, HALF: gl.constexpr
):
    """(weights, the greatest score of each row, sums) of an item's first block. `narrow`: layout of
    the scores; `layout`: of those of a whole block.
    """
    ROWS: gl.constexpr = scores.shape[0]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, narrow)) + HALF * ROWS
    columns = gl.arange(0, scores.shape[1], gl.SliceLayout(0, narrow))
    seen = gl.expand_dims(columns, 0) <= gl.expand_dims(rows, 1)
    scores = gl.where(seen, scores, float("-inf"))
    top = _tops(scores)
    weights = _weights(scores, top, scale)
    if HALF == 0:  # the other keys' are zeros
        weights = gl.join(weights, gl.zeros_like(weights)).permute(0, 2, 1)
        weights = weights.reshape([ROWS, 2 * ROWS])
        weights = gl.convert_layout(weights, layout, assert_trivial=True)
    top = gl.convert_layout(top, gl.SliceLayout(1, layout), assert_trivial=True)
    return weights, top, _sums(weights)


@gluon_jit
def _step(  # type: ignore[no-untyped-def]
    state, rings, i, turn, scale, is_more, layout: gl.constexpr, HALF: gl.constexpr
):
    """The scores of the keys of `turn + 1`, beside the product of `state`'s weights with the values
    of `turn`. `state`: (weights, product, the greatest scores, sums). `is_more`: keys follow.
    """
    q_ring, k_ring, v_ring = rings
    weights, product, before, sums = state
    ROWS: gl.constexpr = product.shape[0]
    wait_filled(v_ring, turn, True)
    queries = rows_of(q_ring, i).slice(HALF * ROWS, ROWS)
    scores = _scores(queries, rows_of(k_ring, turn + 1), layout)
    product = warpgroup_mma(weights, rows_of(v_ring, turn), product, is_async=True)
    scores = warpgroup_mma_wait(1, (scores,))
    let_go(k_ring, turn + 1)
    top = gl.maximum(before, _tops(scores))
    fade = gl.exp2((before - top) * scale)
    new = _weights(scores, top, scale)
    sums = _by_rows(sums, fade) + _sums(new)
    # This wait and that for the keys to come are not for what they bring. Without them compilers
    # move the exponentials behind the wait for the product, which would then run beside nothing.
    new = warpgroup_mma_wait(1, (_operand(new, weights.dtype, layout),))
    wait_filled(k_ring, turn + 2, is_more)
    product, weights = warpgroup_mma_wait(0, (product, weights))
    let_go(v_ring, turn)
    return new, _by_rows(product, fade), top, sums


@gluon_jit
def _seam(  # type: ignore[no-untyped-def]
    state, rings, i, turn, scale, is_last, is_more,
    narrow: gl.constexpr, layout: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """As a step, between item i and the next: (the state that the next begins with, the result of
    item i). After a program's last item, scores are of whatever is there, and nobody reads them.
    """
    q_ring, k_ring, v_ring = rings
    weights, product, top, sums = state
    let_go(q_ring, i)
    wait_filled(q_ring, i + 1, is_last == 0)
    wait_filled(v_ring, turn, True)
    scores = _diagonal_scores(rings, i + 1, turn + 1, narrow, HALF)
    product = warpgroup_mma(weights, rows_of(v_ring, turn), product, is_async=True)
    scores = warpgroup_mma_wait(1, (scores,))
    let_go(k_ring, turn + 1)
    norm = 1.0 / gl.sum(sums, axis=1)
    new, top, sums = _diagonal_weights(scores, scale, narrow, layout, HALF)
    new = warpgroup_mma_wait(1, (_operand(new, weights.dtype, layout),))  # as in `_step`
    wait_filled(k_ring, turn + 2, is_more)
    product, weights = warpgroup_mma_wait(0, (product, weights))
    let_go(v_ring, turn)
    return new, top, sums, _by_rows(product, norm)


@gluon_jit
def _attend(out, out_halves, rings, work, scale, HEADS: gl.constexpr, HALF: gl.constexpr):  # type: ignore[no-untyped-def]
    """The first (0) or second (1) half of each item's queries."""
    q_ring, k_ring, _ = rings
    blocks, num_blocks = work
    ROWS: gl.constexpr = out.block_type.shape[2]
    SIZE: gl.constexpr = out.block_type.shape[3]
    KEYS: gl.constexpr = 2 * ROWS
    # Of scores and of results: blocks have as many keys as heads have elements.
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, (HALF + 1) * ROWS, 16])
    buffer = out_halves.index(HALF)
    num_items = num_items_of(num_blocks, HEADS)
    row, _, _, _ = item_of(blocks, 0, HEADS)
    wait_filled(q_ring, 0, True)
    wait_filled(k_ring, 0, True)
    scores = _diagonal_scores(rings, 0, 0, narrow, HALF)
    scores = warpgroup_mma_wait(0, (scores,))
    let_go(k_ring, 0)
    weights, top, sums = _diagonal_weights(scores, scale, narrow, layout, HALF)
    weights = _operand(weights, out.dtype, layout)
    wait_filled(k_ring, 1, (num_items > 1) | (row >= KEYS))
    turn = 0
    for i in range(num_items):
        is_last = i + 1 == num_items
        product = gl.zeros((ROWS, SIZE), gl.float32, layout)
        for block in range(row // KEYS, 0, -1):
            state = weights, product, top, sums
            is_more = (is_last == 0) | (block > 1)
            weights, product, top, sums = _step(state, rings, i, turn, scale, is_more, layout, HALF)
            turn += 1
        row, _, _, _ = item_of(blocks, gl.minimum(i + 1, num_items - 1), HEADS)
        is_more = (i + 2 < num_items) | ((is_last == 0) & (row >= KEYS))
        state = weights, product, top, sums
        weights, top, sums, product = _seam(
            state, rings, i, turn, scale, is_last, is_more, narrow, layout, HALF
        )
        turn += 1
        first, length, end, head = item_of(blocks, i, HEADS)
        tma.store_wait(0)
        buffer.reshape([ROWS, SIZE]).store(product.to(out.dtype))
        fence_async_shared()
        far = out.shape[2]
        corner = [far, end, far - length + first + HALF * ROWS, head * SIZE]
        tma.async_copy_shared_to_global(out, corner, buffer)
    tma.store_wait(0)


def _prefill(  # type: ignore[no-untyped-def]
    q, k, v, out, blocks, num_blocks, scale, q_head, k_head, v_head,
    HEADS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    rings = ring_of(STAGES, q), ring_of(STAGES, k), ring_of(STAGES, v)
    shape: gl.constexpr = out.block_type.shape
    halves = gl.allocate_shared_memory(out.dtype, [2, 1, 1, shape[2], shape[3]], out.layout)
    work = blocks, num_blocks
    gl.warp_specialize(
        [
            (_attend, (out, halves, rings, work, scale, HEADS, 0)),
            (_attend, (out, halves, rings, work, scale, HEADS, 1)),
            (fetch, ((q, k, v), (q_head, k_head, v_head), rings, work, HEADS, GROUP)),
        ],
        [4, 1],  # warps, and registers of a thread, of those after the first
        [240, 24],
    )


_prefill_kernel = gluon_jit(_prefill, varying=("num_blocks", "q_head", "k_head", "v_head"))


def launch(q: Tensor, k: Tensor, v: Tensor, out: Tensor, blocks: Tensor, scale: float) -> None:
    """`blocks` int32 [B, 3]: all sequences' blocks of 128 queries, those with most keys first; of
    each its first query in its sequence, the sequence's length and its end among the T tokens.
    `scale` multiplies scores. Tokens that no block has are left alone in `out`.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    assert q.shape == out.shape and k.shape == v.shape and len(q) == len(k), (
        f"prefill: {list(q.shape)} with {list(k.shape)} and {list(v.shape)} into {list(out.shape)}"
    )
    assert q.shape[2] == k.shape[2] == BLOCK and num_heads % num_kv_heads == 0, (
        f"prefill: heads {list(q.shape[1:])} of {list(k.shape[1:])}"
    )
    assert q.dtype == k.dtype == v.dtype == out.dtype and out.is_contiguous()
    num_items = len(blocks) * num_heads
    if num_items:
        _prefill_kernel.run(
            described(q, BLOCK), described(k, BLOCK), described(v, BLOCK),
            described(out, BLOCK // 2), blocks, len(blocks), scale * math.log2(math.e),
            q.stride(1), k.stride(1), v.stride(1),
            HEADS=num_heads, GROUP=num_heads // num_kv_heads, STAGES=_STAGES,
            num_warps=4, maxnreg=_REGISTERS,
            grid=(min(num_items, num_multiprocessors(q.device)),), warmup=False,
        )  # fmt: skip
