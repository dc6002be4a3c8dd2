"""Paged attention in plain torch: the backend for CPUs, and the oracle of the others.

Each row of a step is attended by itself, so that its result cannot depend on its neighbours. Keys
are read in place where a row's pages lie one after the other, and are gathered otherwise. What is
equal for all layers (slots, gather lists, the mask) is made once a step, by `plan`. Sizes:

    T tokens of the step, m queries of a row, S its keys, H query heads, K key heads, D head size

Queries are viewed as K batches of H / K heads, and the keys of a batch expanded over its heads with
stride 0: grouped queries copy no key. A lone token makes its H / K heads the query rows of one
head, which reads the keys once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels.attend import PrologueFirst
from tokenspeed.kernels.attention_step import AttentionSpec, AttentionStep, LayerGroup, Pages
from tokenspeed.kernels.kv_dtype import raw, restored, stored

_TILE = 256
"""Queries of a chunk with a past that are attended at once: bounds the mask to [256, S]."""


@dataclass(frozen=True, slots=True)
class _Row:
    """Queries `begin` to `end` of the step over `length` keys, which start at slot `first` or,
    where their pages lie apart, are gathered by `pages`.
    """

    begin: int
    end: int
    length: int
    first: int
    pages: Tensor | None


class TorchAttention(PrologueFirst):
    """Call `plan` before a step's forward; `attend` then runs each of its layers."""

    fuses_prologue: ClassVar[bool] = False
    """It can take a prologue along, as an oracle, but gains nothing by it."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Why it cannot attend layers with this spec, or None if it can."""
        return "it has no attention sinks" if spec.sinks else None

    def __init__(
        self, groups: Sequence[LayerGroup], pool: Pages, dtype: torch.dtype | None = None
    ) -> None:
        """`dtype`: of queries and results, if it is not that of the pages."""
        self._block_size = pool.block_size
        self._pool = pool
        self._device, self._dtype = pool.keys[0].device, dtype or pool.keys[0].dtype
        self._specs = [group.spec for group in groups]
        for spec in self._specs:
            assert (lacks := self.supports(spec)) is None, lacks
        windows = [spec.window for spec in self._specs if spec.window is not None]
        self._narrowest = min(windows, default=math.inf)
        self._group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._slots: list[Tensor] = []
        self._rows: list[list[_Row]] = []
        self._mask = torch.empty(_TILE, 0, dtype=self._dtype, device=self._device)

    def plan(self, step: AttentionStep) -> None:
        """Prepare for `step`: the slots it writes, the rows it attends, a mask for its chunks."""
        assert len(step.query_starts) == len(step.context_lens) + 1, "a start for each row and end"
        assert len(step.page_tables) == len(self._specs), "one list of page tables a cache group"
        spans = list(zip(step.query_starts, step.query_starts[1:], strict=False))
        self._slots, self._rows = [], []
        for tables in step.page_tables:
            slots: list[int] = []
            rows: list[_Row] = []
            for (begin, end), length, table in zip(spans, step.context_lens, tables, strict=True):
                pages = table[: -(-length // self._block_size)].tolist()
                assert 0 < end - begin <= length <= len(pages) * self._block_size, (
                    f"{end - begin} query tokens of {length} tokens in {len(pages)} pages"
                )
                slots += self._slots_of(pages, length - (end - begin), length)
                rows.append(self._row(begin, end, length, pages))
            self._slots.append(torch.tensor(slots, device=self._device))
            self._rows.append(rows)
        self._grow_mask(max(map(self._mask_length, self._rows[0]), default=0))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """Write k and v [T, K, D] into the layer's pages, attend with q [T, H, D] -> [T, H, D]."""
        assert sinks is None, "the torch attention backend does not support sinks"
        group = self._group_of[layer]
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        k_scale, v_scale = self._pool.k_scales[layer], self._pool.v_scales[layer]
        scale, slots = self._specs[group].scale * k_scale, self._slots[group]
        k = _write(keys, slots, k, k_scale)
        v = _write(values, slots, v, v_scale)
        queries = q.reshape(q.shape[0], k.shape[1], -1, q.shape[2])
        parts: list[Tensor] = []
        window = self._specs[group].window
        for row in self._rows[group]:
            own = queries[row.begin : row.end]
            if row.end - row.begin == row.length <= (window or row.length):
                parts.append(_attend_whole(own, k, v, row, scale))
            elif row.end - row.begin == 1:
                parts.append(_attend_token(own, keys, values, row, scale, window))
            else:
                parts += self._attend_chunk(own, keys, values, row, scale, window)
        out = (torch.cat(parts) if len(parts) > 1 else parts[0]).reshape(q.shape)
        return out if v_scale == 1.0 else out * v_scale

    def _attend_chunk(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        row: _Row,
        scale: float,
        window: int | None,
    ) -> list[Tensor]:
        """A chunk with a past, or with tokens out of each other's sight, in tiles: each sees the
        keys up to its own last token.
        """
        num_heads, num_queries, tiles = queries.shape[2], queries.shape[0], []
        cached_keys, cached_values = (
            _cached(pages, row, num_heads, queries.dtype) for pages in (keys, values)
        )
        for begin in range(0, num_queries, _TILE):
            tile = queries[begin : begin + _TILE]
            size, end = tile.shape[0], row.length - num_queries + begin + tile.shape[0]
            first = 0 if window is None else max(0, end - size - window + 1)
            mask = self._mask[-size:, first - end :]
            if window is not None:
                mask = mask + _behind_window(mask, window)
            if mask.is_cuda:  # its kernels want aligned rows, a slice's are not
                mask = mask.contiguous()
            out = F.scaled_dot_product_attention(
                tile.permute(1, 2, 0, 3),
                cached_keys[:, :, first:end],
                cached_values[:, :, first:end],
                attn_mask=mask,
                scale=scale,
            )
            tiles.append(out.permute(2, 0, 1, 3))
        return tiles

    def _slots_of(self, pages: list[int], begin: int, end: int) -> list[int]:
        """Flat slots of a row's tokens `begin` to `end`."""
        size = self._block_size
        return [pages[i // size] * size + i % size for i in range(begin, end)]

    def _row(self, begin: int, end: int, length: int, pages: list[int]) -> _Row:
        if pages == list(range(pages[0], pages[0] + len(pages))):
            return _Row(begin, end, length, pages[0] * self._block_size, None)
        return _Row(begin, end, length, 0, torch.tensor(pages, device=self._device))

    def _mask_length(self, row: _Row) -> int:
        """How many keys a mask for the row has, for some layer."""
        is_tiled = row.end - row.begin < row.length or row.length > self._narrowest
        return row.length if is_tiled and row.end - row.begin > 1 else 0

    def _grow_mask(self, length: int) -> None:
        """Make the mask [_TILE, >= length], 0 or -inf, whose bottom right corner [m, S] is that of
        m queries at the end of S keys: one mask serves every tile of every row.
        """
        if length <= self._mask.shape[1]:
            return
        length = -(-length // 1024) * 1024
        hidden = torch.full((_TILE, length), float("-inf"), dtype=self._dtype, device=self._device)
        self._mask = hidden.triu(length - _TILE + 1)


def _write(pages: Tensor, slots: Tensor, new: Tensor, scale: float) -> Tensor:
    """Write `new` keys or values [T, K, D]. What pages say of them, short of the scale: a row
    without a past reads no more of its own than one that comes in chunks.
    """
    numbers = stored(new, scale, pages.dtype)
    raw(pages).flatten(0, 1).index_copy_(0, slots, raw(numbers))
    return restored(numbers, new.dtype)


def _attend_whole(queries: Tensor, k: Tensor, v: Tensor, row: _Row, scale: float) -> Tensor:
    """A row without a past: its keys are the step's own. [m, K, H / K, D] -> the same."""
    shape = (-1, queries.shape[2], -1, -1)
    keys, values = (x[row.begin : row.end].transpose(0, 1)[:, None].expand(shape) for x in (k, v))
    return F.scaled_dot_product_attention(
        queries.permute(1, 2, 0, 3), keys, values, is_causal=True, scale=scale
    ).permute(2, 0, 1, 3)


def _behind_window(mask: Tensor, window: int) -> Tensor:
    """-inf [m, S] where one of the last m tokens is `window` or more behind a key, else 0."""
    num_queries, num_keys = mask.shape
    return torch.full_like(mask, float("-inf")).tril(num_keys - num_queries - window)


def _attend_token(
    queries: Tensor, keys: Tensor, values: Tensor, row: _Row, scale: float, window: int | None
) -> Tensor:
    """One token over its context. [1, K, H / K, D] -> the same."""
    seen = slice(0 if window is None else -window, None)
    cached_keys, cached_values = (
        _cached(pages, row, 1, queries.dtype)[:, :, seen] for pages in (keys, values)
    )
    return F.scaled_dot_product_attention(
        queries.transpose(0, 1), cached_keys, cached_values, scale=scale
    ).transpose(0, 1)


def _cached(pages: Tensor, row: _Row, num_heads: int, dtype: torch.dtype) -> Tensor:
    """A row's cached keys or values as [K, num_heads, S, D] of `dtype`, in place if its pages allow
    it. (`as_strided`: one call instead of four, for each row of each layer.)
    """
    first, (_, _, num_kv_heads, head_dim) = row.first, pages.shape
    step = num_kv_heads * head_dim
    if row.pages is not None:
        pages = raw(pages).index_select(0, row.pages).view(pages.dtype)
    if pages.dtype != dtype:
        pages = restored(pages.as_strided((row.length, step), (step, 1), first * step), dtype)
        first = 0
    return pages.as_strided(
        (num_kv_heads, num_heads, row.length, head_dim), (head_dim, 0, step, 1), first * step
    )
