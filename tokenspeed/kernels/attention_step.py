"""What every attention backend is given: the layers' specs, the cache, and a step's rows as the
host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


class AttentionSpec(Protocol):
    """What attention needs of a layer's cache spec. `scale` multiplies q.k before the softmax; a
    token sees the last `window` tokens up to itself, or all (None); with `sinks`, heads have some.
    """

    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def window(self) -> int | None: ...
    @property
    def sinks(self) -> bool: ...


class LayerGroup(Protocol):
    """Layers that share a spec and a page table."""

    @property
    def spec(self) -> AttentionSpec: ...
    @property
    def layers(self) -> tuple[int, ...]: ...


class Pages(Protocol):
    """The cache by layer: [num_pages, block_size, Hkv, D], and what its numbers are multiplied by
    when they are read.
    """

    keys: list[Tensor]
    values: list[Tensor]
    k_scales: list[float]
    v_scales: list[float]
    block_size: int


@dataclass(frozen=True)
class AttentionStep:
    """Row i has the query tokens `query_starts[i]` up to `query_starts[i + 1]`, the last of its
    `context_lens[i]` tokens; `page_tables[group][i]` names its pages (int64, on the host), at least
    as many as the context needs.
    """

    query_starts: list[int]
    context_lens: list[int]
    page_tables: Sequence[Sequence[Tensor]]
