"""The last kernel of `sample_rows`: one program a row proves that a proposal survives the cuts.

Top-p keeps a token if the tokens likelier than it have less than `top_p` of the mass that top-k has
left. So a token's proof needs the mass above it, and no threshold.
"""

from __future__ import annotations

from tokenspeed.kernels.noise import row_key
from tokenspeed.kernels.sample_parts import (
    best_noisy,
    first_proposal,
    kth_largest,
    order_of,
    score_of,
    scores_at,
)
from tokenspeed.kernels.triton_jit import jit, tl


@jit
def _among_found(  # type: ignore[no-untyped-def]
    logits, found, count, k, p, log_min_p, key, top, heat, ROOM: tl.constexpr
):
    """The token of a row whose top-k tokens are among `count` found ones. They lie in no certain
    order, so masses are whole numbers, whose sums are the same in any: units of 2^-40.
    """
    at = tl.arange(0, ROOM)
    tokens = tl.load(found + at, mask=at < count, other=2147483647)
    scores = scores_at(logits, tokens, at < count, top, heat)
    scores = tl.where(scores >= kth_largest(scores, k), scores, float("-inf"))
    masses = (tl.exp(scores) * 1099511627776.0).to(tl.int64)
    limit = p.to(tl.float64) * tl.sum(masses, axis=0).to(tl.float64)
    allowed = tl.where(scores >= log_min_p, scores, float("-inf"))
    token = tl.full([], 0, tl.int32)
    is_searching = True
    while is_searching:
        _, token = best_noisy(logits, allowed, tokens, key, top, heat)
        least = tl.div_rn(tl.load(logits + token).to(tl.float32) - top, heat)
        above = tl.sum(tl.where(scores > least, masses, 0), axis=0)
        is_searching = (p < 1.0) & (above > 0) & (above.to(tl.float64) >= limit)
        allowed = tl.where(allowed > least, allowed, float("-inf"))
    return token


@jit
def _mass(logits, floor, is_strict, top, heat, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the tokens whose score is at least `floor`, or above it if `is_strict`."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, V, BLOCK, loop_unroll_factor=2):
        i = begin + tl.arange(0, BLOCK)
        scores = scores_at(logits, i, i < V, top, heat)
        is_in = (scores > floor) | ((scores == floor) & (is_strict == 0))
        total += tl.where(is_in, tl.exp(scores), 0.0)
    return tl.sum(total, axis=0)


@jit
def _kth_of_row(logits, k, top, heat, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """As `kth_largest`, of a whole row: a pass over it for each bit."""
    least = tl.full([], -2147483648, tl.int64)
    for bit in range(32):
        raised = least + (tl.full([], 2147483648, tl.int64) >> bit)
        reached = tl.zeros([BLOCK], tl.int32)
        for begin in tl.range(0, V, BLOCK, loop_unroll_factor=2):
            i = begin + tl.arange(0, BLOCK)
            orders = order_of(scores_at(logits, i, i < V, top, heat))
            reached += ((orders >= raised.to(tl.int32)) & (i < V)).to(tl.int32)
        least = tl.where(tl.sum(reached, axis=0) >= k, raised, least)
    return score_of(least)


@jit
def _propose(logits, floor, low, key, top, heat, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """The row's best noisy token with a score of at least `floor` and above `low`."""
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 2147483647, tl.int32)
    for begin in range(0, V, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        scores = scores_at(logits, i, i < V, top, heat)
        scores = tl.where((scores >= floor) & (scores > low), scores, float("-inf"))
        if tl.max(scores, axis=0) > float("-inf"):
            own, place = best_noisy(logits, scores, i, key, top, heat)
            token = tl.where(own > best, place, token)
            best = tl.maximum(best, own)
    return token


@jit
def _in_row(  # type: ignore[no-untyped-def]
    logits, token, above, total, k, p, floor, key, top, heat, V, BLOCK: tl.constexpr
):
    """The token of a row that is searched as a whole. Without top-k, `token` is the first proposal,
    and `above` the mass above it.
    """
    lowest = tl.full([], float("-inf"), tl.float32)
    least = lowest
    if k > 0:
        kth = _kth_of_row(logits, k, top, heat, V, BLOCK)
        floor = tl.maximum(floor, kth)
        if p < 1.0:
            total = _mass(logits, kth, 0, top, heat, V, BLOCK)
        token = _propose(logits, floor, lowest, key, top, heat, V, BLOCK)
        least = tl.div_rn(tl.load(logits + token).to(tl.float32) - top, heat)
        if p < 1.0:
            above = _mass(logits, least, 1, top, heat, V, BLOCK)
    else:
        least = tl.div_rn(tl.load(logits + token).to(tl.float32) - top, heat)
    while (p < 1.0) & (above > 0) & (above >= p * total):
        token = _propose(logits, floor, least, key, top, heat, V, BLOCK)
        least = tl.div_rn(tl.load(logits + token).to(tl.float32) - top, heat)
        above = _mass(logits, least, 1, top, heat, V, BLOCK)
    return token


@jit
def decide_kernel(  # type: ignore[no-untyped-def]
    logits, positions, temperature, top_k, top_p, log_min_p, seeds, samples, rows, found, noisy,
    above, proposal, ids, status, V, PARTS, stride,
    PARTS_BLOCK: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(status + row) == 0):
        top, bound = tl.load(rows + row * 3), tl.load(rows + row * 3 + 2)
        k, p, floor = tl.load(top_k + row), tl.load(top_p + row), tl.load(log_min_p + row)
        key = row_key(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
        logits += row * stride
        found += row * (ROOM + 1)
        count = tl.load(found + ROOM)
        if (bound > float("-inf")) & (count <= ROOM):
            token = _among_found(logits, found, count, k, p, floor, key, top, heat, ROOM)
        else:
            token = tl.full([], 0, tl.int32)
            over = tl.full([], 0.0, tl.float32)
            if k == 0:
                token = first_proposal(noisy, proposal, row, PARTS, PARTS_BLOCK)
                if p < 1.0:
                    part = tl.arange(0, PARTS_BLOCK)
                    at = above + row * PARTS + part
                    over = tl.sum(tl.load(at, mask=part < PARTS, other=0.0), axis=0)
            total = tl.load(rows + row * 3 + 1)
            token = _in_row(logits, token, over, total, k, p, floor, key, top, heat, V, BLOCK)
        tl.store(ids + row, token.to(tl.int64))
