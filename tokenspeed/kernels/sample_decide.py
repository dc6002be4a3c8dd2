"""The last kernel of `sample_rows`: one program a row proves that a proposal survives the cuts.

Top-p keeps a token if the tokens likelier than it have less than `top_p` of the mass that top-k has
left. So a token's proof needs the mass above it, and no threshold.
"""

from __future__ import annotations

from tokenspeed.kernels.noise import row_key
from tokenspeed.kernels.sample_parts import (
    best_noisy,
    first_of,
    kth_largest,
    order_of,
    proposals,
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
def _mass(logits, floor, low, top, heat, V, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Of the tokens with scores of at least `floor`, if it is finite, and logits above `low`."""
    total = tl.zeros([BLOCK], tl.float32)
    for begin in tl.range(0, V, BLOCK, loop_unroll_factor=2):
        i = begin + tl.arange(0, BLOCK)
        x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
        is_in = x > low
        if floor > float("-inf"):
            is_in &= tl.div_rn(x - top, heat) >= floor
        total += tl.where(is_in, tl.exp((x - top) * (1.0 / heat)), 0.0)
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
def _propose_anew(  # type: ignore[no-untyped-def]
    logits, noisy, tokens, tops, floor, low, key, top, heat, V,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The parts' best tokens with a score of at least `floor` and a logit above `low`. Parts whose
    old proposal is above it keep that; only parts that have other tokens there are looked at.
    """
    part = tl.arange(0, BLOCK)
    is_some = noisy > float("-inf")
    own = tl.load(logits + tokens, mask=is_some, other=float("-inf")).to(tl.float32)
    is_kept = is_some & (own > low)
    noisy = tl.where(is_kept, noisy, float("-inf"))
    is_stale = (tops > low) & (is_kept == 0)
    next_part = tl.min(tl.where(is_stale, part, BLOCK), axis=0)
    while next_part < BLOCK:
        i = next_part * SIZE + tl.arange(0, SIZE)
        scores = scores_at(logits, i, i < V, top, heat)
        x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
        scores = tl.where((x > low) & (scores >= floor), scores, float("-inf"))
        best, token = best_noisy(logits, scores, i, key, top, heat)
        noisy = tl.where(part == next_part, best, noisy)
        tokens = tl.where(part == next_part, token, tokens)
        is_stale = is_stale & (part != next_part)
        next_part = tl.min(tl.where(is_stale, part, BLOCK), axis=0)
    return noisy, tokens


@jit
def _in_row(  # type: ignore[no-untyped-def]
    logits, noisy, tokens, tops, above, total, k, p, floor, key, top, heat, V,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PARTS_BLOCK: tl.constexpr,
):  # fmt: skip
    """The token of a row that is searched as a whole. Without top-k, `noisy` and `tokens` are the
    parts' proposals, and `above` is the mass above the best of them.
    """
    lowest = tl.full([], float("-inf"), tl.float32)
    if k > 0:
        kth = _kth_of_row(logits, k, top, heat, V, BLOCK)
        floor = tl.maximum(floor, kth)
        if p < 1.0:
            total = _mass(logits, kth, lowest, top, heat, V, BLOCK)
        noisy, tokens = _propose_anew(
            logits, noisy, tokens, tops, floor, lowest, key, top, heat, V, SIZE, PARTS_BLOCK
        )
    token = first_of(noisy, tokens)
    if (k > 0) & (p < 1.0):
        low = tl.load(logits + token).to(tl.float32)
        above = _mass(logits, lowest, low, top, heat, V, BLOCK)
    while (p < 1.0) & (above > 0) & (above >= p * total):
        low = tl.load(logits + token).to(tl.float32)
        noisy, tokens = _propose_anew(
            logits, noisy, tokens, tops, floor, low, key, top, heat, V, SIZE, PARTS_BLOCK
        )
        token = first_of(noisy, tokens)
        low = tl.load(logits + token).to(tl.float32)
        above = _mass(logits, lowest, low, top, heat, V, BLOCK)
    return token


@jit
def decide_kernel(  # type: ignore[no-untyped-def]
    logits, positions, temperature, top_k, top_p, log_min_p, seeds, samples, best, rows, found,
    noisy, above, proposal, ids, status, V, PARTS, stride,
    PARTS_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ROOM: tl.constexpr,
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
            part = tl.arange(0, PARTS_BLOCK)
            at, mask = row * PARTS + part, part < PARTS
            tops = tl.load(best + at, mask=mask, other=float("-inf"))
            scores, tokens = proposals(noisy, proposal, row, PARTS, PARTS_BLOCK)
            masses = tl.zeros([PARTS_BLOCK], tl.float32)
            if (k == 0) & (p < 1.0):  # of other rows nobody has weighed anything
                masses = tl.load(above + at, mask=mask, other=0.0)
            if k > 0:  # there are no proposals yet
                scores = tl.full([PARTS_BLOCK], float("-inf"), tl.float32)
            token = _in_row(
                logits, scores, tokens, tops, tl.sum(masses, axis=0), tl.load(rows + row * 3 + 1),
                k, p, floor, key, top, heat, V, SIZE, BLOCK, PARTS_BLOCK,
            )  # fmt: skip
        tl.store(ids + row, token.to(tl.int64))
