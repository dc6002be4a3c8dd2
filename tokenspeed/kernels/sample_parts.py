"""The kernels of `sample_rows` that work on parts of rows, and the one that joins them.

Scores are s = (x - row's maximum) / temperature, rounded as the reference rounds them where they
meet a threshold or win; masses, and bounds of what may win, are content without a division.
Programs of rows that are not random, or whose status is not OK, leave at once.
"""

from __future__ import annotations

from tokenspeed.kernels.noise import bits_of, gumbel_of, row_key
from tokenspeed.kernels.triton_jit import jit, tl


@jit
def order_of(score):  # type: ignore[no-untyped-def]
    """int32 in the order of float32 scores."""
    bits = score.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@jit
def score_of(order):  # type: ignore[no-untyped-def]
    """The float32 of an int64 `order`."""
    bits = tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.int32)
    return bits.to(tl.float32, bitcast=True)


@jit
def kth_largest(scores, k):  # type: ignore[no-untyped-def]
    """Of a block of scores: the largest value that k of them reach, by bisection. -inf is below
    every score, so it may fill a block up.
    """
    orders = order_of(scores)
    least = tl.full([], -2147483648, tl.int64)
    for bit in range(32):
        raised = least + (tl.full([], 2147483648, tl.int64) >> bit)
        is_reached = tl.sum((orders >= raised.to(tl.int32)).to(tl.int32), axis=0) >= k
        least = tl.where(is_reached, raised, least)
    return score_of(least)


@jit
def scores_at(logits, at, mask, top, heat):  # type: ignore[no-untyped-def]
    """Scores of the tokens `at` of a row; -inf outside the mask."""
    x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    return tl.div_rn(x - top, heat)


@jit
def best_noisy(logits, scores, tokens, key, top, heat):  # type: ignore[no-untyped-def]
    """The largest noisy score of a block and its lowest token. -inf is never taken.

    A bound of the noise needs no logarithm: -log(-log(1 - u)) < -log(u), and the bits of a float32,
    read as an integer, are at most 2^23 (127 + its log2), short by 0.09 or less (Mitchell 1962). So
    tokens are visited by their bounds, largest first, until no bound reaches the best exact score;
    mostly that is after one or two. `scores` may be off by their rounding.
    """
    u = bits_of(key, tokens).to(tl.float32) + 0.5  # times 2^31
    rough = u.to(tl.int32, bitcast=True).to(tl.float32)
    # (127 + 31) log(2), with some room for rounding, and log(2) / 2^23.
    bound = scores + (109.5183 - 8.262958294867817e-08 * rough)
    best, token = tl.full([], float("-inf"), tl.float32), tl.full([], 2147483647, tl.int32)
    highest = tl.max(bound, axis=0)
    while (highest >= best) & (highest > float("-inf")):
        first = tl.min(tl.where(bound == highest, tokens, 2147483647), axis=0)
        score = tl.div_rn(tl.load(logits + first).to(tl.float32) - top, heat)
        noisy = score + gumbel_of(bits_of(key, first))
        is_better = (noisy > best) | ((noisy == best) & (first < token))
        token = tl.where(is_better, first, token)
        best = tl.where(is_better, noisy, best)
        bound = tl.where(tokens == first, float("-inf"), bound)
        highest = tl.max(bound, axis=0)
    return best, token


@jit
def first_of(noisy, tokens):  # type: ignore[no-untyped-def]
    """Of the best tokens of a row's parts the best, the lowest of equal ones."""
    return tl.min(tl.where(noisy == tl.max(noisy, axis=0), tokens, 2147483647), axis=0)


@jit
def proposals(noisy, proposal, row, PARTS, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """What the parts of a row proposed: noisy scores, tokens."""
    part = tl.arange(0, BLOCK)
    at, mask = row * PARTS + part, part < PARTS
    scores = tl.load(noisy + at, mask=mask, other=float("-inf"))
    return scores, tl.load(proposal + at, mask=mask, other=2147483647)


@jit
def scan_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, best, mass, where, faults, groups, V, PARTS, stride,
    BANS: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A part's maximum and its lowest place, faults, mass, and the maxima of its groups."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, axis=0)
    lowest = x if BANS else tl.abs(x)  # what must be below infinity; NaN is not
    is_fault = ((lowest < float("inf")) == 0) & (i < V)
    at = row * PARTS + part
    tl.store(best + at, top)
    tl.store(where + at, tl.min(tl.where(x == top, i, 2147483647), axis=0))
    tl.store(faults + at, tl.max(is_fault.to(tl.int32), axis=0))
    heat = tl.load(temperature + row)
    if heat > 0:
        base = tl.where(top > float("-inf"), top, 0.0)
        tl.store(mass + at, tl.sum(tl.exp((x - base) * (1.0 / heat)), axis=0))
        if tl.load(top_k + row) > 0:
            highest = tl.max(tl.reshape(x, [SIZE // GROUPS, GROUPS]), axis=0)
            tl.store(groups + at * GROUPS + tl.arange(0, GROUPS), highest)


@jit
def join_kernel(  # type: ignore[no-untyped-def]
    temperature, top_k, best, mass, where, faults, groups, rows, found, ids, status, PARTS,
    BLOCK: tl.constexpr, BLOCK_G: tl.constexpr, GROUPS: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A row's status and likeliest token; of a random row the maximum, the mass, and the bound of
    top-k (-inf: none).
    """
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at, mask = row * PARTS + part, part < PARTS
    tops = tl.load(best + at, mask=mask, other=float("-inf"))
    places = tl.load(where + at, mask=mask, other=2147483647)
    fault = tl.max(tl.load(faults + at, mask=mask, other=0), axis=0)
    top = tl.max(tops, axis=0)
    state = tl.where(fault > 0, 1, tl.where(top > float("-inf"), 0, 2))
    token = tl.min(tl.where((tops == top) & mask, places, 2147483647), axis=0)
    tl.store(ids + row, tl.where(state == 0, token, 0).to(tl.int64))
    tl.store(status + row, state.to(tl.int64))
    heat = tl.load(temperature + row)
    if (heat > 0) & (state == 0):
        masses = tl.load(mass + at, mask=mask, other=0.0)
        total = tl.sum(masses * tl.exp(tl.div_rn(tops - top, heat)), axis=0)
        bound = tl.full([], float("-inf"), tl.float32)
        k = tl.load(top_k + row)
        if (k > 0) & (k <= PARTS * GROUPS):
            group = tl.arange(0, BLOCK_G)
            highest = groups + row * PARTS * GROUPS + group
            x = tl.load(highest, mask=group < PARTS * GROUPS, other=float("-inf"))
            bound = kth_largest(x, k)
        tl.store(rows + row * 3, top)
        tl.store(rows + row * 3 + 1, total)
        tl.store(rows + row * 3 + 2, bound)
        tl.store(found + row * (ROOM + 1) + ROOM, 0)


@jit
def propose_kernel(  # type: ignore[no-untyped-def]
    logits, positions, temperature, top_k, log_min_p, seeds, samples, rows, found, status, noisy,
    proposal, V, PARTS, stride, SIZE: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """A part's best noisy score; or its tokens above the bound of top-k, of which the order does
    not matter, and which may be some too many: scores that differ here may be equal when rounded.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    if (heat > 0) & (tl.load(status + row) == 0):
        top, bound = tl.load(rows + row * 3), tl.load(rows + row * 3 + 2)
        i = part * SIZE + tl.arange(0, SIZE)
        logits += row * stride
        x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
        if bound > float("-inf"):
            is_above = (x >= bound - 1e-6 * (tl.abs(bound) + tl.abs(top))).to(tl.int32)
            count = tl.sum(is_above, axis=0)
            if count > 0:
                found += row * (ROOM + 1)
                to = tl.atomic_add(found + ROOM, count) + tl.cumsum(is_above, axis=0) - 1
                tl.store(found + to, i, mask=(is_above > 0) & (to < ROOM))
        elif tl.load(top_k + row) == 0:
            scores = (x - top) * (1.0 / heat)
            floor = tl.load(log_min_p + row)
            if floor > float("-inf"):
                scores = tl.where(tl.div_rn(x - top, heat) >= floor, scores, float("-inf"))
            key = row_key(tl.load(seeds + row), tl.load(samples + row), tl.load(positions + row))
            best, token = best_noisy(logits, scores, i, key, top, heat)
            tl.store(noisy + row * PARTS + part, best)
            tl.store(proposal + row * PARTS + part, token)


@jit
def weigh_kernel(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, rows, status, noisy, above, proposal, V, PARTS, stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part's mass above the first proposal, of rows with top-p alone."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(temperature + row)
    is_asked = (tl.load(top_p + row) < 1.0) & (tl.load(top_k + row) == 0)
    if (heat > 0) & (tl.load(status + row) == 0) & is_asked:
        top = tl.load(rows + row * 3)
        scores, tokens = proposals(noisy, proposal, row, PARTS, BLOCK)
        token = first_of(scores, tokens)
        logits += row * stride
        low = tl.load(logits + token).to(tl.float32)
        i = part * SIZE + tl.arange(0, SIZE)
        x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
        masses = tl.where(x > low, tl.exp((x - top) * (1.0 / heat)), 0.0)
        tl.store(above + row * PARTS + part, tl.sum(masses, axis=0))
