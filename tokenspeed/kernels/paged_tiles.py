"""Parts of the kernels that attend over pages: one tile of cached tokens, folded into a softmax
that runs along (the maximum `top`, the denominator `total`, the weighted sum `acc`; scores in
units of log2). A hidden token has a score of -1e30: differences are never undefined.
"""

from __future__ import annotations

import torch

from tokenspeed.kernels.triton_jit import jit, tl

LOG2_E = 1.4426950408889634


def tile_tokens(dtype: torch.dtype, block: int, kilobytes: int) -> int:
    """Cached tokens of a tile whose keys fill so much memory, for heads padded to `block`."""
    return max(16, (kilobytes << 10) // (dtype.itemsize * block))


@jit
def fold_tile(  # type: ignore[no-untyped-def]
    queries, top, total, acc, keys, values, pages, n, head, there, seen, scale,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Fold tokens n [N] of the sequence whose page ids `pages` points to, as far as they are
    `there` [N], into the softmax of queries [M, BLOCK] that see them by `seen` [M or 1, N]. WHOLE:
    all are there and seen. Pages may be of another dtype: products are of that of the queries.
    """
    d = tl.arange(0, BLOCK)
    if WHOLE:
        page = tl.load(pages + n // PAGE)
    else:
        page = tl.load(pages + n // PAGE, mask=there, other=0)
    place = (page.to(tl.int64) * PAGE + n % PAGE) * (HKV * D) + head * D
    place = place[:, None] + d[None, :]
    if WHOLE and BLOCK == D:
        tile = tl.load(keys + place)
    else:
        tile = tl.load(keys + place, mask=there[:, None] & (d < D)[None, :], other=0.0)
    tile = tile.to(queries.dtype)
    scores = tl.dot(queries, tl.trans(tile), input_precision="ieee") * scale
    if not WHOLE:
        scores = tl.where(seen, scores, -1e30)
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    weights = tl.exp2(scores - new_top[:, None])
    shrink = tl.exp2(top - new_top)
    total = total * shrink + tl.sum(weights, axis=1)
    if WHOLE and BLOCK == D:
        tile = tl.load(values + place)
    else:
        tile = tl.load(values + place, mask=there[:, None] & (d < D)[None, :], other=0.0)
    tile = tile.to(queries.dtype)
    acc = tl.dot(weights.to(tile.dtype), tile, acc * shrink[:, None], input_precision="ieee")
    return new_top, total, acc


@jit
def finish(top, total, acc, sinks, heads, is_head, SINKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """The softmax's result [M, BLOCK], each row with the sink of its head, if there are any."""
    top = tl.where(is_head, top, 0.0)
    total = tl.where(is_head, total, 1.0)
    if SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        total += tl.exp2(sink * 1.4426950408889634 - top)
    return acc / total[:, None]
