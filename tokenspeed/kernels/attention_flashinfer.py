"""Paged attention whose chunks run FlashAttention-3, by FlashInfer; all else is Triton's.

FlashInfer plans on the host, once a step and cache group; every layer of the group then runs that
plan. Rows that begin their sequence attend to the step's own keys and values, which lie in large
blocks (TMA fetches them): on Hopper by a kernel of our own (`hopper_prefill`), faster by 7% at one
prompt of 8192 tokens and by 31% at eight of 1024. Rows with a past read all of it from the pages.
A step of which the host knows nothing (in a CUDA graph), one with few tokens in chunks, a layer
with a window or with sinks, and decodes take the Triton kernels.

FlashAttention-3 reads pages of the queries' dtype alone. Those of float8_e4m3fn are read by
FlashAttention-2; rows without a past still take the other, with their keys and values as a page
would give them back.

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
from tokenspeed.kernels.paged_layer import PagedLayer

HEAD_DIM = 128
DTYPES = (torch.bfloat16, torch.float16)

MIN_TOKENS = 256
"""Fewer tokens in chunks are not worth a plan, which takes the host 0.1 to 1 ms."""


class RaggedPrefill(Protocol):
    """What is used of FlashInfer's BatchPrefillWithRaggedKVCacheWrapper (0.6.11)."""

    def plan(
        self,
        qo_indptr: Tensor,
        kv_indptr: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        *,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None: ...

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> object: ...


class PagedPrefill(Protocol):
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
        kv_data_type: torch.dtype,
        seq_lens: Tensor,
        max_token_per_sequence: int,
        disable_split_kv: bool,
    ) -> None: ...

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *,
        k_scale: float,
        v_scale: float,
        out: Tensor,
    ) -> object: ...


class Prefill(NamedTuple):
    """The two wrappers that share a step's rows."""

    paged: PagedPrefill
    ragged: RaggedPrefill


def leaves_to_triton(spec: AttentionSpec) -> str | None:
    """Why FlashInfer does not attend chunks of layers with this spec, or None if it does."""
    if spec.head_dim != HEAD_DIM:
        return f"it serves head size {HEAD_DIM}, not {spec.head_dim}"
    if spec.window is not None:
        return "it has no kernel for a sliding window"
    return "it has no kernel for attention sinks" if spec.sinks else None


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
    lengths = step.context_lens
    counts = [-(-length // block_size) for length in lengths]
    starts = list(itertools.accumulate(counts, initial=0))
    pages = torch.empty(starts[-1], dtype=torch.int32, pin_memory=pinned)
    tables = zip(step.page_tables[group], counts, strict=True)
    torch.cat([table[:count] for table, count in tables], out=pages)
    return PagedRows(
        query_starts=_ints(step.query_starts, pinned),
        page_starts=_ints(starts, pinned),
        pages=pages,
        last_page_lens=_ints([(length - 1) % block_size + 1 for length in lengths], pinned),
        context_lens=_ints(lengths, pinned),
    )


def _ints(values: list[int], pinned: bool) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, pin_memory=pinned)


def num_continued(step: AttentionStep) -> int:
    """So many rows, from the first on, hold all those that have a past before this step."""
    spans = itertools.pairwise(step.query_starts)
    pairs = zip(spans, step.context_lens, strict=True)
    past = [i for i, ((begin, end), length) in enumerate(pairs, 1) if length > end - begin]
    return past[-1] if past else 0


class _Turn:
    """Wrappers and the end of their plans' copies to the device, which read pinned buffers of the
    wrappers: the next plan must not write there before.
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
    """Prefill of one cache group's layers. Two pairs of wrappers take turns, so that a step can be
    planned while the device has yet to copy the plan of the one before.
    """

    def __init__(
        self,
        index: int,
        spec: AttentionSpec,
        pages: Tensor,
        make: Callable[[], Prefill],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`pages` [num_pages, block_size, Hkv, D]: the keys of one of the layers. `dtype`: of
        queries, if it is not that of the pages.
        """
        self._index = index
        self._spec = spec
        self._block_size = pages.shape[1]
        self._device, self._dtype = pages.device, dtype or pages.dtype
        self._kv_dtype = pages.dtype
        self._turns = itertools.cycle([_Turn(make(), pages.device) for _ in range(2)])
        self._planned: Prefill | None = None
        self._num_paged = 0

    def plan(self, step: AttentionStep) -> None:
        turn, count = next(self._turns), num_continued(step)
        turn.begin()
        if count:
            self._plan_paged(turn.prefill.paged, _first_rows(step, count))
        if count < len(step.context_lens):
            starts = step.query_starts[count:]
            self._plan_ragged(turn.prefill.ragged, [start - starts[0] for start in starts])
        turn.end()
        self._planned, self._num_paged = turn.prefill, step.query_starts[count]

    def _plan_paged(self, prefill: PagedPrefill, step: AttentionStep) -> None:
        spec = self._spec
        rows = paged_rows(step, self._index, self._block_size, pinned=self._is_cuda)
        prefill.plan(
            rows.query_starts, rows.page_starts, rows.pages, rows.last_page_lens,
            spec.num_heads, spec.num_kv_heads, spec.head_dim, self._block_size,
            causal=True, sm_scale=spec.scale, q_data_type=self._dtype, kv_data_type=self._kv_dtype,
            seq_lens=rows.context_lens,
            max_token_per_sequence=max(b - a for a, b in itertools.pairwise(step.query_starts)),
            disable_split_kv=True,  # FlashAttention-2 would need room for partial results
        )  # fmt: skip

    def _plan_ragged(self, prefill: RaggedPrefill, starts: list[int]) -> None:
        spec, bounds = self._spec, _ints(starts, self._is_cuda)
        prefill.plan(
            bounds, bounds, spec.num_heads, spec.num_kv_heads, spec.head_dim,
            causal=True, sm_scale=spec.scale, q_data_type=self._dtype,
        )  # fmt: skip

    @property
    def _is_cuda(self) -> bool:
        return self._device.type == "cuda"

    def run(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        layer: PagedLayer,
        out: Tensor,
    ) -> None:
        """Attend with the planned rows' queries, all of `queries`, into `out`. `new`: keys and
        values of the same tokens, as pages would give them back.
        """
        assert self._planned is not None, "run before plan"
        n = self._num_paged
        if n:
            self._planned.paged.run(
                queries[:n], (layer.keys, layer.values),
                k_scale=layer.k_scale, v_scale=layer.v_scale, out=out[:n],
            )  # fmt: skip
        if n < queries.shape[0]:
            self._planned.ragged.run(queries[n:], new[0][n:], new[1][n:], out=out[n:])

    def warm_up(self, layer: PagedLayer) -> None:
        """Load the kernels, by queries of nothing to whatever is in page 0."""
        first = torch.zeros(2, dtype=torch.int64)
        self.plan(AttentionStep([0, 1, 2], [2, 1], [[first, first]] * (self._index + 1)))
        query, key = (
            torch.zeros(2, heads, self._spec.head_dim, dtype=self._dtype, device=self._device)
            for heads in (self._spec.num_heads, self._spec.num_kv_heads)
        )
        self.run(query, (key, key), layer, torch.empty_like(query))


def _first_rows(step: AttentionStep, count: int) -> AttentionStep:
    tables = [group[:count] for group in step.page_tables]
    return AttentionStep(step.query_starts[: count + 1], step.context_lens[:count], tables)


class FlashInferAttention(TritonAttention):
    """As its base, but for chunks of the groups that FlashInfer serves."""

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pool: Pages,
        tables: Sequence[Tensor],
        make: Callable[[], Prefill],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`make` gives a wrapper; each belongs to one group. Kernels are loaded here."""
        super().__init__(groups, pool, tables, dtype)
        self._prefills: list[GroupPrefill] = []
        self._prefill_of: dict[int, GroupPrefill] = {}
        self._host: AttentionStep | None = None
        self._is_planned = False
        for index, group in enumerate(groups):
            if leaves_to_triton(group.spec) is None:
                first = group.layers[0]
                prefill = GroupPrefill(index, group.spec, pool.keys[first], make, self._dtype)
                prefill.warm_up(self._layers[first])
                self._prefills.append(prefill)
                self._prefill_of |= dict.fromkeys(group.layers, prefill)

    def plan_device(self, step: DeviceStep, results: Tensor | None = None) -> None:
        super().plan_device(step, results)
        host = step.host
        is_long = host is not None and host.query_starts[-1] >= MIN_TOKENS
        self._host = host if is_long else None
        self._is_planned = False

    def _attends_own_keys(self, layer: int, sinks: Tensor | None) -> bool:
        return self._prefill(layer, sinks) is not None

    def _attend_chunks(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        layer: int,
        chunks: DeviceStep,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        prefill = self._prefill(layer, sinks)
        if prefill is None:
            super()._attend_chunks(queries, new, layer, chunks, sinks, out)
            return
        assert self._step is not None, "attention before plan_device"
        own = slice(self._step.num_decodes, self._step.num_tokens)
        keys, values = new
        prefill.run(queries[own], (keys[own], values[own]), self._layers[layer], out[own])

    def _prefill(self, layer: int, sinks: Tensor | None) -> GroupPrefill | None:
        """What serves the layer in this step, if FlashInfer does. The first to ask plans the step:
        what comes before it on the device is launched by then.
        """
        if self._host is None or sinks is not None:
            return None
        if not self._is_planned:
            for prefill in self._prefills:
                prefill.plan(self._host)
            self._is_planned = True
        return self._prefill_of.get(layer)
