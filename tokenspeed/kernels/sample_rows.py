"""`sample_rows`: one token for each row of logits, greedy rows and random ones in one call.

    logits -> argmax                                                      rows of temperature 0
           -> (x - max) / temperature -> cuts -> + noise -> argmax        other rows

A row's token never depends on the other rows. Ties take the lowest id. A row whose logits are not
finite, or whose every token is banned, gets a status instead of a token.

The kernels sort nothing and compute no threshold of top-p: they *propose* the token with the
largest noisy score, then *prove* that it survives the cuts, by the mass of the tokens likelier than
it; if it does not, nothing less likely does, and the next proposal comes from above it. So:

    scan      each part of each row: maximum, mass, maxima of small groups
    join      each row: the whole row's maximum and mass; greedy rows end here. k of the groups
              having a maximum of at least x, so have k tokens: a bound below which top-k cuts
    propose   each part: its best noisy score; of a row with such a bound, the tokens above it
    weigh     each part: the mass above the row's first proposal
    decide    each row: prove, and propose again while needed

Where top_k is larger than the number of groups, or more tokens than `_ROOM` lie above the bound
(ties), top-k is found by bisection, 32 passes over the row: right, but slow.

Tokens agree with the reference's, except that sums and logarithms may differ in their last places:
where two noisy scores, or a mass and top_p, are that close, either may be taken. Two tokens of
different scores whose probabilities round to the same number tie in the reference's top-p, not
here. Results repeat bit for bit, and alike in any batch: parts are of one size whatever the batch.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels.noise import gumbel, row_keys
from tokenspeed.kernels.sample_decide import decide_kernel
from tokenspeed.kernels.sample_parts import join_kernel, propose_kernel, scan_kernel, weigh_kernel
from tokenspeed.kernels.triton_jit import block_of
from tokenspeed.kernels.truncation import cut

OK, NOT_FINITE, NO_TOKEN = 0, 1, 2

_SIZE = 4096
"""Tokens of a part."""
_GROUPS = 32
"""Groups of a part."""
_ROOM = 2048
"""Tokens above the bound of a row with top_k that are kept."""
_BLOCK = 8192
"""Tokens of a row that `decide` looks at together."""


class RowParams(NamedTuple):
    """How each row is sampled: [R] each."""

    temperature: Tensor
    """float32; 0: greedy."""
    top_k: Tensor
    """int32; 0: no cut."""
    top_p: Tensor
    """float32; 1: no cut."""
    log_min_p: Tensor
    """float32; -inf: no cut."""
    seeds: Tensor
    """int64."""
    samples: Tensor
    """int64: the number of the sample among those of its request."""


def reference(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    samples: Tensor,
    bans: bool,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    """Ids and statuses, int64 [R], of `logits` [R, V] of any floating dtype. `positions` int64 [R]:
    the place of the new token. With `bans`, -inf is a token that may not be taken; without, a fault
    of the model, as NaN and +inf are. `greedy`: every temperature is known to be 0.
    """
    logits = logits.float()
    best, ids = logits.max(dim=-1)  # NaN, if there is one
    # One sum instead of V tests: a NaN or an infinity in a row survives in the sum.
    is_finite = best < math.inf if bans else logits.sum(dim=-1).isfinite()
    if not greedy:
        rows = (temperature > 0).nonzero()[:, 0]
        scores = (logits[rows] - best[rows, None]) / temperature[rows, None]
        cut(scores, top_k[rows], top_p[rows], log_min_p[rows])
        keys = row_keys(seeds[rows], samples[rows], positions[rows])
        ids[rows] = (scores + gumbel(keys, scores.shape[1])).argmax(dim=-1)
    status = torch.where(best == -math.inf, NO_TOKEN, OK)
    status = torch.where(is_finite, status, NOT_FINITE)
    return torch.where(status == OK, ids, 0), status


class _Room(NamedTuple):
    """What the kernels leave for one another: tensors of their own, since Triton compiles a kernel
    anew for a pointer that is less aligned.
    """

    best: Tensor
    """float32 [R, P], by part: the maximum,"""
    mass: Tensor
    where: Tensor
    """int32, the place of the maximum,"""
    faults: Tensor
    """int32, is a logit not finite?,"""
    groups: Tensor
    """float32 [R, P * _GROUPS], the maxima of groups,"""
    noisy: Tensor
    """float32, the best noisy score,"""
    proposal: Tensor
    """int32, its token,"""
    above: Tensor
    """float32, the mass above the row's proposal."""
    rows: Tensor
    """float32 [R, 3]: maximum, mass, bound of top-k."""
    found: Tensor
    """int32 [R, _ROOM + 1]: tokens above that bound, and their number."""


def _room(rows: int, parts: int, device: torch.device) -> _Room:
    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=device)

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    return _Room(
        best=floats(rows, parts),
        mass=floats(rows, parts),
        where=integers(rows, parts),
        faults=integers(rows, parts),
        groups=floats(rows, parts * _GROUPS),
        noisy=floats(rows, parts),
        proposal=integers(rows, parts),
        above=floats(rows, parts),
        rows=floats(rows, 3),
        found=integers(rows, _ROOM + 1),
    )


def launch(
    logits: Tensor,
    positions: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    log_min_p: Tensor,
    seeds: Tensor,
    samples: Tensor,
    bans: bool,
    greedy: bool,
) -> tuple[Tensor, Tensor]:
    params = RowParams(temperature, top_k, top_p, log_min_p, seeds, samples)
    _check(logits, positions, params)
    count, vocab_size = logits.shape
    ids, status = torch.empty_like(positions), torch.empty_like(positions)
    if count == 0:
        return ids, status
    parts = -(-vocab_size // _SIZE)
    room = _room(count, parts, logits.device)
    scan_kernel[count, parts](
        logits, temperature, top_k, *room[:5],
        vocab_size, parts, logits.stride(0), BANS=bans, SIZE=_SIZE, GROUPS=_GROUPS, num_warps=4,
    )  # fmt: skip
    join_kernel[count,](
        temperature, top_k, *room[:5], room.rows, room.found,
        ids, status, parts, BLOCK=block_of(parts), BLOCK_G=block_of(parts * _GROUPS),
        GROUPS=_GROUPS, ROOM=_ROOM, num_warps=4,
    )  # fmt: skip
    if not greedy:
        _launch_random(logits, positions, params, room, ids, status)
    return ids, status


def _launch_random(
    logits: Tensor, positions: Tensor, params: RowParams, room: _Room, ids: Tensor, status: Tensor
) -> None:
    """The tokens of rows with a temperature and status OK, into `ids`."""
    count, vocab_size = logits.shape
    parts, stride = room.best.shape[1], logits.stride(0)
    temperature, top_k, top_p, *others = params
    _, _, _, _, _, noisy, proposal, above, rows, found = room
    propose_kernel[count, parts](
        logits, positions, temperature, top_k, *others, rows, found, status, noisy,
        proposal, vocab_size, parts, stride, SIZE=_SIZE, ROOM=_ROOM, num_warps=8,
    )  # fmt: skip
    weigh_kernel[count, parts](
        logits, temperature, top_k, top_p, rows, status, noisy, above, proposal, vocab_size,
        parts, stride, SIZE=_SIZE, BLOCK=block_of(parts), num_warps=4,
    )  # fmt: skip
    decide_kernel[count,](
        logits, positions, *params, room.best, rows, found, noisy, above, proposal, ids, status,
        vocab_size, parts, stride, PARTS_BLOCK=block_of(parts), SIZE=_SIZE, BLOCK=_BLOCK,
        ROOM=_ROOM, num_warps=16,
    )  # fmt: skip


def _check(logits: Tensor, positions: Tensor, params: RowParams) -> None:
    assert logits.dim() == 2 and logits.stride(1) == 1, "logits: rows must lie dense"
    assert logits.is_floating_point() and logits.shape[1] > 0, f"logits {logits.dtype}"
    types = {"top_k": torch.int32, "seeds": torch.int64, "samples": torch.int64}
    for name, each in {"positions": positions, **params._asdict()}.items():
        dtype = torch.int64 if name == "positions" else types.get(name, torch.float32)
        assert each.dtype == dtype and each.shape == logits.shape[:1] and each.is_contiguous(), (
            f"{name} must be dense {dtype} {list(logits.shape[:1])}, "
            f"not {each.dtype} {list(each.shape)}"
        )


def _fake(logits: Tensor, positions: Tensor, *params: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(positions), torch.empty_like(positions)


_library: Any = torch.library.Library("tokenspeed", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "sample_rows(Tensor logits, Tensor positions, Tensor temperature, Tensor top_k, Tensor top_p, "
    "Tensor log_min_p, Tensor seeds, Tensor samples, bool bans, bool greedy) -> (Tensor, Tensor)"
)
_library.impl("sample_rows", reference, "CPU")
_library.impl("sample_rows", launch, "CUDA")
torch.library.register_fake("tokenspeed::sample_rows", _fake, lib=_library)

sample_rows = torch.ops.tokenspeed.sample_rows.default
