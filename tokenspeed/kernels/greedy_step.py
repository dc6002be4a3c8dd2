"""The two ends of a recorded decode step, a kernel or two each.

    begin_rows     row slots -> next input ids, positions, lengths     before the embedding
    end_rows       logits -> likeliest ids, appended to the slots      after the head
    append_rows    ids -> appended to the slots                        after other ways to sample

In plain torch each is a dozen small kernels, which a step of half a millisecond notices. Sizes: B
rows, S slots of L tokens, V words. `tokens` is int32 [S, L]; `lengths`, `rows` (the slot of each
row) and all results are int64. The last slot is scratch: nothing is appended to it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tokenspeed.kernels.triton_jit import HAS_KERNELS, block_of, jit, tl

_BLOCK = 2048
_PROGRAMS = 4224
"""At most about 32 for each multiprocessor of a large card: a program has one load under way."""


class RowInputs(NamedTuple):
    """The last known token of each row, its place, and the number of known tokens: int64 [B]."""

    ids: Tensor
    positions: Tensor
    lengths: Tensor


class RowOutputs(NamedTuple):
    """int64 [B]. `is_bad` is 1 where a logit was not finite: the id means nothing there."""

    ids: Tensor
    is_bad: Tensor


def begin_reference(tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowInputs:
    known = lengths[rows]
    return RowInputs(tokens[rows, known - 1].long(), known - 1, known)


def end_reference(logits: Tensor, tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowOutputs:
    """Append the likeliest token (the lowest id of equal ones) of finite `logits` [B, V] to the
    slots, in place.
    """
    is_bad = ~logits.float().sum(dim=-1).isfinite()
    ids = logits.float().max(dim=-1).indices
    append_reference(tokens, lengths, rows, ids, is_bad)
    return RowOutputs(ids, is_bad.long())


def append_reference(
    tokens: Tensor, lengths: Tensor, rows: Tensor, ids: Tensor, fault: Tensor
) -> None:
    """Append `ids` where `fault` is 0 and there is room, in place."""
    known = lengths[rows]
    accepted = (fault == 0) & (rows != tokens.shape[0] - 1) & (known < tokens.shape[1])
    places = known.clamp(max=tokens.shape[1] - 1)
    kept = tokens[rows, places].long()
    tokens[rows, places] = torch.where(accepted, ids, kept).to(torch.int32)
    lengths[rows] = torch.where(accepted, known + 1, known)


@jit
def _begin_kernel(  # type: ignore[no-untyped-def]
    tokens, lengths, rows, ids, positions, known, B, L, BLOCK: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < B
    slot = tl.load(rows + i, mask=mask, other=0)
    length = tl.load(lengths + slot, mask=mask, other=1)
    token = tl.load(tokens + slot * L + length - 1, mask=mask, other=0)
    tl.store(ids + i, token.to(tl.int64), mask=mask)
    tl.store(positions + i, length - 1, mask=mask)
    tl.store(known + i, length, mask=mask)


@jit
def _best_kernel(  # type: ignore[no-untyped-def]
    logits, best, where, bad, V, PARTS, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A part of a row's logits, SIZE of them: the maximum, its lowest place, is all finite?"""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = part * SIZE
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    faults = tl.zeros([BLOCK], tl.int32)
    for offset in range(0, SIZE, BLOCK):
        i = begin + offset + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + i, mask=i < V, other=float("-inf")).to(tl.float32)
        faults |= ((tl.abs(x) < float("inf")) == 0).to(tl.int32) & (i < V).to(tl.int32)
        place = tl.where(x > highest, i, place)
        highest = tl.maximum(x, highest)
    top = tl.max(highest, axis=0)
    first = tl.min(tl.where(highest == top, place, 2147483647), axis=0)
    tl.store(best + row * PARTS + part, top)
    tl.store(where + row * PARTS + part, first)
    tl.store(bad + row * PARTS + part, tl.max(faults, axis=0))


@jit
def _append(tokens, lengths, slot, token, is_kept, L, SCRATCH):  # type: ignore[no-untyped-def]
    length = tl.load(lengths + slot)
    is_kept &= (slot != SCRATCH) & (length < L)
    tl.store(tokens + slot * L + length, token, mask=is_kept)
    tl.store(lengths + slot, length + 1, mask=is_kept)


@jit
def _append_kernel(tokens, lengths, rows, ids, faults, L, SCRATCH):  # type: ignore[no-untyped-def]
    row = tl.program_id(0)
    token = tl.load(ids + row).to(tl.int32)
    is_kept = tl.load(faults + row) == 0
    _append(tokens, lengths, tl.load(rows + row), token, is_kept, L, SCRATCH)


@jit
def _end_kernel(  # type: ignore[no-untyped-def]
    best, where, bad, tokens, lengths, rows, ids, is_bad, PARTS, L, SCRATCH,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the parts of one row, and append its token."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    mask = i < PARTS
    highest = tl.load(best + row * PARTS + i, mask=mask, other=float("-inf"))
    place = tl.load(where + row * PARTS + i, mask=mask, other=2147483647)
    fault = tl.max(tl.load(bad + row * PARTS + i, mask=mask, other=0), axis=0)
    top = tl.max(highest, axis=0)
    token = tl.min(tl.where((highest == top) & mask, place, 2147483647), axis=0)
    _append(tokens, lengths, tl.load(rows + row), token, fault == 0, L, SCRATCH)
    tl.store(ids + row, token.to(tl.int64))
    tl.store(is_bad + row, fault.to(tl.int64))


def launch_begin(tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowInputs:
    _check(tokens, lengths, rows)
    count = rows.shape[0]
    result = RowInputs(*(torch.empty_like(rows) for _ in RowInputs._fields))
    _begin_kernel[(count + 127) // 128,](
        tokens, lengths, rows, *result, count, tokens.shape[1], BLOCK=128
    )
    return result


def launch_end(logits: Tensor, tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowOutputs:
    _check(tokens, lengths, rows)
    count, vocab_size = logits.shape
    assert logits.stride(1) == 1 and rows.shape == (count,), (
        f"logits {logits.shape} of {rows.shape}"
    )
    size = _BLOCK * max(1, -(-vocab_size * count // (_PROGRAMS * _BLOCK)))
    parts = -(-vocab_size // size)
    best = torch.empty(count, parts, dtype=torch.float32, device=logits.device)
    where, bad = (torch.empty_like(best, dtype=torch.int32) for _ in range(2))
    _best_kernel[count, parts](
        logits, best, where, bad, vocab_size, parts, logits.stride(0), SIZE=size, BLOCK=_BLOCK
    )
    result = RowOutputs(*(torch.empty_like(rows) for _ in RowOutputs._fields))
    _end_kernel[count,](
        best, where, bad, tokens, lengths, rows, *result, parts, tokens.shape[1],
        tokens.shape[0] - 1, BLOCK=block_of(parts), num_warps=1,
    )  # fmt: skip
    return result


def launch_append(
    tokens: Tensor, lengths: Tensor, rows: Tensor, ids: Tensor, fault: Tensor
) -> None:
    _check(tokens, lengths, rows)
    assert ids.shape == fault.shape == rows.shape and ids.dtype == fault.dtype == torch.int64, (
        f"ids {ids.dtype} {list(ids.shape)} and faults {fault.dtype} {list(fault.shape)} of rows"
    )
    _append_kernel[rows.shape[0],](
        tokens, lengths, rows, ids, fault, tokens.shape[1], tokens.shape[0] - 1, num_warps=1
    )


def _check(tokens: Tensor, lengths: Tensor, rows: Tensor) -> None:
    assert tokens.dtype == torch.int32 and tokens.is_contiguous(), "tokens: int32 [S, L], dense"
    assert lengths.dtype == rows.dtype == torch.int64, "lengths and rows are int64"
    assert lengths.is_contiguous() and rows.is_contiguous(), "lengths and rows lie dense"


def begin_rows(tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowInputs:
    """What the rows in slots `rows` [B] go on from."""
    run = launch_begin if HAS_KERNELS and tokens.is_cuda else begin_reference
    return run(tokens, lengths, rows)


def end_rows(logits: Tensor, tokens: Tensor, lengths: Tensor, rows: Tensor) -> RowOutputs:
    """Choose each row's likeliest token by `logits` [B, V], of any floating dtype, and append it
    where every logit is finite.
    """
    run = launch_end if HAS_KERNELS and tokens.is_cuda else end_reference
    return run(logits, tokens, lengths, rows)


def append_rows(tokens: Tensor, lengths: Tensor, rows: Tensor, ids: Tensor, fault: Tensor) -> None:
    """Append `ids` [B] to the rows' slots where `fault` (int64 [B]) is 0."""
    run = launch_append if HAS_KERNELS and tokens.is_cuda else append_reference
    run(tokens, lengths, rows, ids, fault)
