"""How each attention backend is made, by the names of `tokenspeed.attention_backends`. Its class
says of a layer's spec whether it serves it (`supports`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_flashinfer import HEAD_DIM, FlashInferAttention
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.flashinfer_builds import fp8_prefill_name, is_built, prefill_name
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.spans import span

Attention = TorchAttention | TritonAttention


@dataclass(frozen=True)
class Parts:
    """What a backend is made of. `dtype`: that of queries and results. `library`: the module that
    its row names, imported.
    """

    groups: list[CacheGroup]
    pool: PagePool
    slots: Slots
    dtype: torch.dtype
    library: Any = None


@dataclass(frozen=True, kw_only=True)
class Maker:
    """`library`: a module that takes seconds to import. `is_built(dtype, dtype of the cache)`:
    whether nothing has to be compiled for it.
    """

    kind: type[Attention]
    make: Callable[[Parts], Attention]
    library: str | None = None
    is_built: Callable[[torch.dtype, torch.dtype], bool] = lambda dtype, kv_dtype: True


def _make_torch(parts: Parts) -> Attention:
    return TorchAttention(parts.groups, parts.pool, parts.dtype)


def _make_triton(parts: Parts) -> Attention:
    return TritonAttention(parts.groups, parts.pool, parts.slots.device_tables, parts.dtype)


def _make_flashinfer(parts: Parts) -> Attention:
    keys, tables = parts.pool.keys[0], parts.slots.device_tables

    def prefill() -> Any:
        return parts.library.make_prefill(keys.device, converts=keys.dtype != parts.dtype)

    with span("kernels.warmup"):
        return FlashInferAttention(parts.groups, parts.pool, tables, prefill, parts.dtype)


def _is_flashinfer_built(dtype: torch.dtype, kv_dtype: torch.dtype) -> bool:
    names = [prefill_name(dtype, HEAD_DIM)]
    if kv_dtype != dtype:
        names.append(fp8_prefill_name(dtype, HEAD_DIM))
    return all(map(is_built, names))


ATTENTION_MAKERS: dict[str, Maker] = {
    "torch": Maker(kind=TorchAttention, make=_make_torch),
    "triton": Maker(kind=TritonAttention, make=_make_triton),
    "flashinfer": Maker(
        kind=FlashInferAttention,
        make=_make_flashinfer,
        library="tokenspeed.kernels.flashinfer_prefill",
        is_built=_is_flashinfer_built,
    ),
}
