"""`kv_store`: write a step's keys and values into their pages, with what is left to do to q and k.

One launch for q, k and v: k is normed and turned on its way into the cache, v is copied, q comes
back normed and turned. Without a prologue q is left alone. Shapes: q [T, Hq, D], k and v
[T, Hkv, D]. Whoever attends to the step's own keys and values without a detour through pages gives
`own_keys` and `own_values` [T, Hkv, D], which get what the pages would say of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tokenspeed.kernels.attend import Prologue, prologue_reference
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.head_prologue import operands_of, prepared_heads
from tokenspeed.kernels.kv_dtype import limit_of, narrowed, raw, restored, stored
from tokenspeed.kernels.paged_layer import PagedLayer, assert_heads, places_of
from tokenspeed.kernels.triton_jit import assert_rows, block_of, gdc, jit, launches_early, tl

_ELEMENTS = 1024
"""Of a program: eight heads of 128, whose reads one warp has under way at once. More warps with a
read or two each took 1.4 times as long on an H200 (32 query heads, 8192 tokens).
"""


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: PagedLayer,
    step: DeviceStep,
    prologue: Prologue | None,
    own_keys: Tensor | None = None,
    own_values: Tensor | None = None,
) -> Tensor:
    """The queries as attention takes them; keys and values of the step are in the cache after."""
    if prologue is not None:
        q, k = prologue_reference(q, k, prologue)
    places = places_of(layer, step)
    for pages, new, scale, own in (
        (layer.keys, k, layer.k_scale, own_keys),
        (layer.values, v, layer.v_scale, own_values),
    ):
        numbers = stored(new[: step.num_tokens], scale, pages.dtype)
        raw(pages).flatten(0, 1).index_copy_(0, places, raw(numbers))
        if own is not None:
            own[: step.num_tokens] = restored(numbers, torch.float32) * scale
    return q


@jit
def _store_own(own, place, numbers, scale, mask):  # type: ignore[no-untyped-def]
    """What pages that hold `numbers` would say."""
    tl.store(own + place, (numbers.to(tl.float32) * scale).to(own.dtype.element_ty), mask=mask)


def _kv_store_kernel(  # type: ignore[no-untyped-def]
    q, k, v, q_weight, k_weight, cos, sin, out, own_keys, own_values, keys, values, table,
    slots, positions, token_rows,
    q_token, q_head, k_token, k_head, v_token, v_head, cos_token, sin_token, table_slot, eps,
    k_scale, v_scale, k_inverse, v_inverse,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    NORM: tl.constexpr, ROPE: tl.constexpr, PAGE: tl.constexpr, HEADS: tl.constexpr,
    OWN_KEYS: tl.constexpr, OWN_VALUES: tl.constexpr, LIMIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token: program (token, part). The first parts are of k and v, the others
    of q. LIMIT: of numbers in pages of another dtype (0: they are of that of k and v).
    """
    if EARLY:
        gdc.gdc_wait()
        gdc.gdc_launch_dependents()
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    KV_PARTS: tl.constexpr = (HKV + HEADS - 1) // HEADS
    cos += token * cos_token
    sin += token * sin_token
    i = tl.arange(0, BLOCK)[None, :]
    if part < KV_PARTS:
        head = part * HEADS + tl.arange(0, HEADS)
        mask = (head < HKV)[:, None] & (i < D)
        slot = tl.load(slots + tl.load(token_rows + token)).to(tl.int64)
        position = tl.load(positions + token)
        page = tl.load(table + slot * table_slot + position // PAGE).to(tl.int64)
        place = (page * PAGE + position % PAGE) * (HKV * D) + head[:, None] * D + i
        new_k = prepared_heads(
            k + token * k_token + head * k_head, head < HKV, k_weight, cos, sin, eps,
            D, HALF, BLOCK, NORM, ROPE,
        )  # fmt: skip
        new_v = tl.load(v + token * v_token + head[:, None] * v_head + i, mask=mask)
        if LIMIT > 0:
            new_k = narrowed(new_k, k_inverse, keys, LIMIT)
            new_v = narrowed(new_v, v_inverse, values, LIMIT)
        tl.store(keys + place, new_k, mask=mask)
        tl.store(values + place, new_v, mask=mask)
        place = (token * HKV + head[:, None]) * D + i
        if OWN_KEYS:
            _store_own(own_keys, place, new_k, k_scale, mask)
        if OWN_VALUES:
            _store_own(own_values, place, new_v, v_scale, mask)
    else:
        head = (part - KV_PARTS) * HEADS + tl.arange(0, HEADS)
        new_q = prepared_heads(
            q + token * q_token + head * q_head, head < HQ, q_weight, cos, sin, eps,
            D, HALF, BLOCK, NORM, ROPE,
        )  # fmt: skip
        place = (token * HQ + head[:, None]) * D + i
        tl.store(out + place, new_q, mask=(head < HQ)[:, None] & (i < D))


_kernel = jit(_kv_store_kernel, varying=("slots", "positions", "token_rows"))


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: PagedLayer,
    step: DeviceStep,
    prologue: Prologue | None,
    own_keys: Tensor | None = None,
    own_values: Tensor | None = None,
) -> Tensor:
    """As `reference`. With a prologue, queries of tokens behind the step's are left undefined."""
    assert_heads("kv_store", q, k, v, layer, step)
    assert_rows("kv_store", q, k, v, layer.keys)
    for own in (own_keys, own_values):
        assert own is None or (own.shape == k.shape and own.is_contiguous()), (
            f"kv_store: {k.shape} into {own.shape}"
        )
    operands = operands_of("kv_store", q, prologue)
    num_heads, num_kv_heads, size = q.shape[1], k.shape[1], q.shape[2]
    block = block_of(size)
    height = min(max(_ELEMENTS // block, 1), block_of(num_kv_heads))
    parts = -(-num_kv_heads // height) + (-(-num_heads // height) if prologue else 0)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if prologue else q
    early = launches_early()
    _kernel[step.num_tokens, parts](
        q, k, v, *operands[:4], out, out if own_keys is None else own_keys,
        out if own_values is None else own_values, layer.keys, layer.values, layer.table,
        step.slots, step.positions, step.token_rows,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        operands.cos_token, operands.sin_token, layer.table.stride(0), operands.eps,
        layer.k_scale, layer.v_scale, 1 / layer.k_scale, 1 / layer.v_scale,
        HQ=num_heads, HKV=num_kv_heads, D=size, BLOCK=block, PAGE=layer.block_size, HEADS=height,
        **operands.flags, OWN_KEYS=own_keys is not None, OWN_VALUES=own_values is not None,
        LIMIT=limit_of(layer.keys.dtype) if layer.converts(k.dtype) else 0.0,
        EARLY=early, num_warps=1, launch_pdl=early,
    )  # fmt: skip
    return out
