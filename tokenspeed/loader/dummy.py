"""Random weights, for when speed is of interest and text is not: only the config is needed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor


class DummyWeights:
    """Each tensor is drawn from the seed and its name alone, so that neither order nor dtype
    matters: vectors that scale around 1, all else around 0. A device type has its own sequence.
    """

    def __init__(self, slots: Mapping[str, Tensor], seed: int) -> None:
        self.shapes = {name: tuple(slot.shape) for name, slot in slots.items()}
        self._slots, self._seed = slots, seed

    def num_bytes(self, name: str) -> int:
        return self._slots[name].nbytes

    def read(self, name: str) -> Tensor:
        device = self._slots[name].device
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator(device).manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        values = torch.empty(self.shapes[name], dtype=torch.float32, device=device)
        values.normal_(0.0, 0.02, generator=generator)
        is_scale = values.ndim == 1 and name.endswith(".weight")
        return values + 1.0 if is_scale else values
