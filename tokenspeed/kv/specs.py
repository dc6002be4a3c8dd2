"""What each layer keeps between steps. Layers with equal specs form one cache group with one page
table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class FullAttention:
    """Keys and values of every token. `scale` multiplies q.k before the softmax. A token sees the
    last `window` tokens up to itself, or all of them (None); pages behind a window are kept all the
    same, since no family of models here has one so far. `sinks`: each head's softmax has one
    more logit, which the model hands over.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        assert self.window is None or self.window > 0, f"a window of {self.window} tokens"

    def elements_per_token(self) -> int:
        """Cache elements (of the KV dtype) that one token takes in one layer."""
        return 2 * self.num_kv_heads * self.head_dim


CacheSpec = FullAttention

LayerScales = list[tuple[float, float]]
"""By layer: what keys, and values, of a cache in another dtype are multiplied by when read."""


@dataclass(frozen=True)
class CacheGroup:
    """Layers that share a spec, hence a page table. `layers` are indices in the model."""

    spec: CacheSpec
    layers: tuple[int, ...]


def cache_groups(specs: list[CacheSpec]) -> list[CacheGroup]:
    """Group layer specs (`specs[i]` is layer i's) in order of first appearance."""
    layers: dict[CacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return [CacheGroup(spec, tuple(indices)) for spec, indices in layers.items()]
