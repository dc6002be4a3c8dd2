"""Between host and device without waiting for either.

A plain `torch.tensor(..., device="cuda")` waits for everything that runs there: one of them in a
launch, and no step overlaps the one before. Pinned memory is copied in stream order instead; its
blocks are kept until the copy is over (torch's caching host allocator sees to that).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


def send(
    values: Sequence[Any] | np.ndarray[Any, Any],
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Numbers (nested lists make dimensions) as a tensor on the device."""
    numbers = torch.from_numpy(np.array(values)).to(dtype)  # torch.tensor is three times slower
    if device.type == "cpu":
        return numbers
    pinned = torch.empty(numbers.shape, dtype=dtype, pin_memory=True).copy_(numbers)
    return pinned.to(device, non_blocking=True)


class Fetch:
    """A copy to the host that has been enqueued; `wait` ends when that copy does, whatever else the
    device has to do behind it.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = tuple(_like(each) for each in tensors)
        for host, each in zip(self._host, tensors, strict=True):
            host.copy_(each, non_blocking=True)
        if tensors[0].is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> tuple[Tensor, ...]:
        if self._event is not None:
            self._event.synchronize()
        return self._host


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
