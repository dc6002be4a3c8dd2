"""`score_rows`: log-probabilities of given tokens and of the likeliest ones, without a sort.

Each part of a row gives its maximum, its mass and its likeliest tokens, found one after another;
joined, they give the row's. Of equal tokens the lowest ids come first (the reference's order is
torch's). Shapes: logits [N, V] of any floating dtype, ids [N]; K = min(MAX_TOP, V) likeliest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import block_of, jit, tl
from tokenspeed.request import MAX_LOGPROBS

_SIZE = 4096
"""Tokens of a part."""
_GROUPS = 32
"""Groups of a part."""


def reference(logits: Tensor, ids: Tensor, with_top: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities of `ids`, float32 [N], the likeliest tokens, int64 [N, K], and their
    log-probabilities, best first. K is 0 unless `with_top`.

    Always MAX_LOGPROBS likeliest tokens, however few are wanted: which of equal ones come first may
    depend on their number, and that is other rows' business.
    """
    logits = logits.float()
    normaliser = logits.logsumexp(dim=-1, keepdim=True)
    chosen = (logits.gather(1, ids[:, None]) - normaliser)[:, 0]
    best = logits.topk(_num_top(logits, with_top))
    return chosen, best.indices, best.values - normaliser


def _num_top(logits: Tensor, with_top: bool) -> int:
    return min(MAX_LOGPROBS, logits.shape[1]) if with_top else 0


@jit
def _best_of_group(logits, tokens, V, above, after):  # type: ignore[no-untyped-def]
    """Of the tokens behind token `after`, whose logit is `above`, in order of logits and ids."""
    x = tl.load(logits + tokens, mask=tokens < V, other=float("-inf")).to(tl.float32)
    is_left = (x < above) | ((x == above) & (tokens > after))
    x = tl.where(is_left, x, float("-inf"))
    best = tl.max(x, axis=0)
    return best, tl.min(tl.where((x == best) & is_left, tokens, 2147483647), axis=0)


@jit
def _part_kernel(  # type: ignore[no-untyped-def]
    logits, best, mass, values, tokens, V, PARTS, stride,
    K: tl.constexpr, SIZE: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """A part's maximum, its mass relative to that, and its K likeliest tokens: the likeliest of
    each of GROUPS groups is kept at hand, and sought again only where one was taken.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    logits += row * stride
    i = part * SIZE + tl.arange(0, SIZE)
    x = tl.load(logits + i, mask=i < V, other=float("-inf")).to(tl.float32)
    at = row * PARTS + part
    top = tl.max(x, axis=0)
    tl.store(best + at, top)
    tl.store(mass + at, tl.sum(tl.exp(x - tl.where(top > float("-inf"), top, 0.0)), axis=0))
    if K > 0:
        grouped = tl.reshape(x, [SIZE // GROUPS, GROUPS])
        tops = tl.max(grouped, axis=0)
        ids = tl.reshape(i, [SIZE // GROUPS, GROUPS])
        firsts = tl.min(tl.where(grouped == tops[None, :], ids, 2147483647), axis=0)
        group = tl.arange(0, GROUPS)
        for k in range(K):
            top = tl.max(tops, axis=0)
            token = tl.min(tl.where(tops == top, firsts, 2147483647), axis=0)
            tl.store(values + at * K + k, top)
            tl.store(tokens + at * K + k, token)
            own = token % GROUPS
            members = part * SIZE + tl.arange(0, SIZE // GROUPS) * GROUPS + own
            next_top, next_token = _best_of_group(logits, members, V, top, token)
            tops = tl.where(group == own, next_top, tops)
            firsts = tl.where(group == own, next_token, firsts)


@jit
def _join_kernel(  # type: ignore[no-untyped-def]
    logits, ids, best, mass, values, tokens, chosen, top_ids, top, V, PARTS, stride,
    K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The normaliser of a row, and the likeliest of its parts' likeliest tokens."""
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    at = row * PARTS + part
    tops = tl.load(best + at, mask=part < PARTS, other=float("-inf"))
    highest = tl.max(tops, axis=0)
    total = tl.sum(tl.load(mass + at, mask=part < PARTS, other=0.0) * tl.exp(tops - highest))
    normaliser = highest + tl.log(total)
    logit = tl.load(logits + row * stride + tl.load(ids + row)).to(tl.float32)
    tl.store(chosen + row, logit - normaliser)
    if K > 0:
        j = tl.arange(0, BLOCK_K)
        at = row * PARTS * K + j
        x = tl.load(values + at, mask=j < PARTS * K, other=float("-inf"))
        i = tl.load(tokens + at, mask=j < PARTS * K, other=2147483647)
        for k in range(K):
            token = tl.min(tl.where(x == highest, i, 2147483647), axis=0)
            # Where all that is left is not finite there is no token; an id it must be.
            tl.store(top_ids + row * K + k, tl.minimum(token, V - 1).to(tl.int64))
            tl.store(top + row * K + k, highest - normaliser)
            x = tl.where(i == token, float("-inf"), x)
            highest = tl.max(x, axis=0)


def launch(logits: Tensor, ids: Tensor, with_top: bool) -> tuple[Tensor, Tensor, Tensor]:
    count, vocab_size = logits.shape
    assert logits.stride(1) == 1 and logits.is_floating_point(), "logits: rows must lie dense"
    assert ids.dtype == torch.int64 and ids.shape == (count,) and ids.is_contiguous(), (
        f"ids must be dense int64 [{count}], not {ids.dtype} {list(ids.shape)}"
    )
    num_top, parts = _num_top(logits, with_top), -(-vocab_size // _SIZE)
    chosen, top_ids, top = _fake(logits, ids, with_top)
    if count == 0:
        return chosen, top_ids, top
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    mass = torch.empty_like(best)
    values = torch.empty(count, parts * num_top, dtype=torch.float32, device=logits.device)
    tokens = torch.empty_like(values, dtype=torch.int32)
    _part_kernel[count, parts](
        logits, best, mass, values, tokens, vocab_size, parts, logits.stride(0), K=num_top,
        SIZE=_SIZE, GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip
    _join_kernel[count,](
        logits, ids, best, mass, values, tokens, chosen, top_ids, top, vocab_size, parts,
        logits.stride(0), K=num_top, BLOCK=block_of(parts), BLOCK_K=block_of(parts * num_top + 1),
        num_warps=4,
    )  # fmt: skip
    return chosen, top_ids, top


def _fake(logits: Tensor, ids: Tensor, with_top: bool) -> tuple[Tensor, Tensor, Tensor]:
    shape = logits.shape[0], _num_top(logits, with_top)
    chosen = logits.new_empty(shape[0], dtype=torch.float32)
    return chosen, ids.new_empty(shape), chosen.new_empty(shape)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("score_rows(Tensor logits, Tensor ids, bool with_top) -> (Tensor, Tensor, Tensor)")
_library.impl("score_rows", reference, "CPU")
_library.impl("score_rows", launch, "CUDA")
torch.library.register_fake("tokenspeed::score_rows", _fake, lib=_library)

score_rows = torch.ops.tokenspeed.score_rows.default
