"""Steps through an attention backend as the worker runs them, for tests of FlashInfer's kernels."""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from paged_cases import Case, Operands

from tokenspeed.kernels.attention_flashinfer import FlashInferAttention, Prefill
from tokenspeed.kernels.attention_step import AttentionStep
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.flashinfer_builds import (
    fp8_prefill_name,
    is_built,
    is_installed,
    prefill_name,
)
from tokenspeed.kv.specs import CacheGroup, FullAttention


def runs_flashinfer() -> bool:
    """Has this machine what it needs, built?"""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        return False
    names = [each(torch.bfloat16, 128) for each in (prefill_name, fp8_prefill_name)]
    return is_installed() and all(map(is_built, names))


def make(*, converts: bool = False) -> Prefill:
    library = importlib.import_module("tokenspeed.kernels.flashinfer_prefill")
    made: Prefill = library.make_prefill(torch.device("cuda"), converts=converts)
    return made


def spec_of(case: Case) -> FullAttention:
    return FullAttention(
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.size,
        scale=case.size**-0.5,
    )


def host_of(given: Operands, num_decodes: int) -> AttentionStep:
    step, table = given.step, given.layer.table.cpu().long()
    starts = (step.query_starts[num_decodes:] - num_decodes).tolist()
    slots = step.slots[num_decodes:].tolist()
    lengths = step.context_lens[num_decodes:].tolist()
    return AttentionStep(starts, lengths, [[table[slot] for slot in slots]])


def attend(backend: type[TritonAttention], case: Case, own: Operands, step: DeviceStep) -> Any:
    group = CacheGroup(spec_of(case), (0,))
    layer, dtype = own.layer, own.q.dtype
    pool: Any = SimpleNamespace(
        keys=[layer.keys], values=[layer.values], k_scales=[layer.k_scale],
        v_scales=[layer.v_scale],
    )  # fmt: skip
    if issubclass(backend, FlashInferAttention):
        made = functools.partial(make, converts=layer.converts(dtype))
        attention: TritonAttention = backend([group], pool, [layer.table], made, dtype)
    else:
        attention = backend([group], pool, [layer.table], dtype)
    attention.plan_device(step)
    if own.prologue is None:
        return attention.attend(own.q, own.k, own.v, 0, None)
    return attention.attend_fused(own.q, own.k, own.v, 0, None, own.prologue)
