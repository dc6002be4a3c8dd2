"""Paged attention whose chunks run FlashAttention-3, by FlashInfer; all else is Triton's.

FlashInfer plans on the host, once a step and cache group; every layer of the group then runs that
plan. A step of which the host knows nothing (in a CUDA graph), one with few tokens in chunks, a
layer with a window or with sinks, and decodes take the Triton kernels.

This file does not import FlashInfer, which takes seconds: `flashinfer_prefill.py` does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from tokenspeed.kernels.attention_step import AttentionSpec, AttentionStep, LayerGroup, Pages
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.device_step import DeviceStep

HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16)

MIN_TOKENS = 256
"""Fewer tokens in chunks are not worth a plan, which takes the host 0.1 to 1 ms."""


class Prefill(Protocol):
    """What is used of FlashInfer's BatchPrefillWithPagedKVCacheWrapper (0.6.11)."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        seq_lens: Tensor,
        max_token_per_sequence: int,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> object: ...


def is_served(spec: AttentionSpec) -> bool:
    """Does FlashInfer attend chunks of layers with this spec?"""
    return spec.head_dim == HEAD_DIM and not getattr(spec, "window", 0)


class PagedRows(NamedTuple):
    """B rows as FlashInfer takes them, int32 on the host (pinned for a GPU, where it copies them to
    without a wait).
    """

    query_starts: Tensor
    """[B + 1]"""
    page_starts: Tensor
    """[B + 1]: where each row's pages begin among `pages`."""
    pages: Tensor
    last_page_lens: Tensor
    """[B]: tokens in a row's last page, 1 up to the page size."""
    context_lens: Tensor
    """[B]"""


def paged_rows(step: AttentionStep, group: int, block_size: int, *, pinned: bool) -> PagedRows:
    """The step's rows with their pages in cache group `group`."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, pin_memory=pinned)

    lengths = step.context_lens
    counts = [-(-length // block_size) for length in lengths]
    starts = list(itertools.accumulate(counts, initial=0))
    pages = torch.empty(starts[-1], dtype=torch.int32, pin_memory=pinned)
    tables = zip(step.page_tables[group], counts, strict=True)
    torch.cat([table[:count] for table, count in tables], out=pages)
    return PagedRows(
        query_starts=ints(step.query_starts),
        page_starts=ints(starts),
        pages=pages,
        last_page_lens=ints([(length - 1) % block_size + 1 for length in lengths]),
        context_lens=ints(lengths),
    )


class _Turn:
    """A wrapper and the end of its plan's copy to the device, which reads a pinned buffer of the
    wrapper: the next plan must not write there before.
    """

    def __init__(self, prefill: Prefill, device: torch.device) -> None:
        self.prefill = prefill
        self._copied: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def begin(self) -> None:
        if self._copied is not None:
            self._copied.synchronize()

    def end(self) -> None:
        if self._copied is not None:
            self._copied.record()


class GroupPrefill:
    """Prefill of one cache group's layers. Two wrappers take turns, so that a step can be planned
    while the device has yet to copy the plan of the one before.
    """

    def __init__(self, index: int, spec: AttentionSpec, pages: Tensor, make: Callable[[], Prefill]):
        """`pages` [num_pages, block_size, Hkv, D]: the keys of one of the layers."""
        self._index = index
        self._spec = spec
        self._block_size = pages.shape[1]
        self._device, self._dtype = pages.device, pages.dtype
        self._turns = itertools.cycle([_Turn(make(), pages.device) for _ in range(2)])
        self._planned: Prefill | None = None

    def plan(self, step: AttentionStep) -> None:
        spec, turn = self._spec, next(self._turns)
        is_cuda = self._device.type == "cuda"
        rows = paged_rows(step, self._index, self._block_size, pinned=is_cuda)
        turn.begin()
        turn.prefill.plan(
            rows.query_starts, rows.page_starts, rows.pages, rows.last_page_lens,
            spec.num_heads, spec.num_kv_heads, spec.head_dim, self._block_size,
            causal=True, sm_scale=spec.scale, q_data_type=self._dtype, seq_lens=rows.context_lens,
            max_token_per_sequence=max(b - a for a, b in itertools.pairwise(step.query_starts)),
        )  # fmt: skip
        turn.end()
        self._planned = turn.prefill

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, out: Tensor) -> None:
        """Attend with the planned rows' queries, all of `queries`, into `out`."""
        assert self._planned is not None, "run before plan"
        self._planned.run(queries, (keys, values), out=out)

    def warm_up(self, keys: Tensor, values: Tensor) -> None:
        """Load the kernel, by a query of nothing to whatever is in page 0."""
        first = torch.zeros(1, dtype=torch.int64)
        self.plan(AttentionStep([0, 1], [1], [[first]] * (self._index + 1)))
        shape = 1, self._spec.num_heads, self._spec.head_dim
        query = torch.zeros(shape, dtype=self._dtype, device=self._device)
        self.run(query, keys, values, torch.empty_like(query))


class FlashInferAttention(TritonAttention):
    """As its base, but for chunks of the groups that FlashInfer serves."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pool: Pages,
        tables: Sequence[Tensor],
        make: Callable[[], Prefill],
    ) -> None:
        """`make` gives a wrapper; each belongs to one group. Kernels are loaded here."""
        super().__init__(groups, pool, tables)
        self._prefills: list[GroupPrefill] = []
        self._prefill_of: dict[int, GroupPrefill] = {}
        self._is_planned = False
        for index, group in enumerate(groups):
            if is_served(group.spec):
                first = group.layers[0]
                prefill = GroupPrefill(index, group.spec, pool.keys[first], make)
                prefill.warm_up(pool.keys[first], pool.values[first])
                self._prefills.append(prefill)
                self._prefill_of |= dict.fromkeys(group.layers, prefill)

    def plan_device(self, step: DeviceStep) -> None:
        super().plan_device(step)
        host = step.host
        self._is_planned = host is not None and host.query_starts[-1] >= MIN_TOKENS
        if host is not None and self._is_planned:
            for prefill in self._prefills:
                prefill.plan(host)

    def _attend_chunks(
        self, queries: Tensor, layer: int, chunks: DeviceStep, sinks: Tensor | None, out: Tensor
    ) -> None:
        prefill = self._prefill_of.get(layer) if self._is_planned and sinks is None else None
        if prefill is None:
            super()._attend_chunks(queries, layer, chunks, sinks, out)
            return
        assert self._step is not None, "attention before plan_device"
        own = slice(self._step.num_decodes, self._step.num_tokens)
        paged = self._layers[layer]
        prefill.run(queries[own], paged.keys, paged.values, out[own])
