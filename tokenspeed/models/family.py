"""What a model file offers to the rest of the engine, as one row of `MODELS`.

Beside its config and module stand two tables, all applied from outside to the finished module.
Paths are those of submodules, `*` stands for a layer's number, and a parameter's last name (weight,
bias) is the same on both sides:

- weights: module in the checkpoint -> (module here, slot). A `MergedLinear` has as many slots as
  projections, any other module just slot 0.
- cache_specs: config -> what each layer keeps between steps, in layer order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import nn

from tokenspeed.kv.specs import CacheSpec

Weights = Mapping[str, tuple[str, int]]


class DecoderConfig(Protocol):
    """A frozen dataclass with all of a model's numbers, checked and resolved."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def max_model_len(self) -> int: ...
    @classmethod
    def from_dict(cls, hf: Mapping[str, Any], max_model_len: int | None = None) -> Self: ...


@dataclass(frozen=True, kw_only=True)
class Family:
    """`model(config)` is a module with `embed(ids [T]) -> x [T, H]`, `forward(x, positions [T]) ->
    hidden [T, H]`, `head(rows [N, H]) -> logits [N, V]`, its blocks in `layers`, and
    `fill_buffers()`.
    """

    config: type[DecoderConfig]
    model: Callable[[Any], nn.Module]
    weights: Weights
    cache_specs: Callable[[Any], list[CacheSpec]]
