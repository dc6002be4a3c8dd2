"""The plainest `SequenceState`: one sequence with a growing cache, attended in full each time."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tokenspeed.batch import forward_context


class DenseState:
    """Keeps every layer's keys and values, and checks that layers number themselves 0, 1, 2..."""

    def __init__(self, num_layers: int, scale: float) -> None:
        self.keys: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.values: list[list[Tensor]] = [[] for _ in range(num_layers)]
        self.scale = scale

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        assert sinks is None
        self.keys[layer].append(k.clone())
        self.values[layer].append(v.clone())
        group = q.shape[1] // k.shape[1]
        keys, values = (
            torch.cat(cache[layer]).repeat_interleave(group, 1)
            for cache in (self.keys, self.values)
        )
        past = len(keys) - len(q)
        hidden = torch.ones(len(q), len(keys), dtype=torch.bool).triu(past + 1)
        scores = torch.einsum("qhd,khd->hqk", q, keys) * self.scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, values)


class Sequence:
    """One sequence fed to a model chunk by chunk."""

    def __init__(self, model: nn.Module, num_layers: int, scale: float) -> None:
        self.model, self.state, self.length = model, DenseState(num_layers, scale), 0

    def feed(self, ids: list[int]) -> Tensor:
        """Logits [T, V] of the new tokens."""
        positions = torch.arange(self.length, self.length + len(ids))
        self.length += len(ids)
        with torch.no_grad(), forward_context(self.state):
            hidden = self.model(self.model.embed(torch.tensor(ids)), positions)
            return self.model.head(hidden)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        out: list[int] = []
        while len(out) < count:
            ids = [int(self.feed(ids)[-1].argmax())]
            out += ids
        return out
