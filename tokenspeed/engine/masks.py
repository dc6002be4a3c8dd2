"""Masks of allowed tokens, as they come from the host and as the sampler takes them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from tokenspeed.engine.pinned import send


def unpack(masks: Tensor, logits: Tensor) -> Tensor:
    """Bool [R, V] beside `logits` [R, V], true where a token is allowed, from packed words on the
    host (int32 [R, W]).
    """
    octets = masks.to(logits.device, non_blocking=True).view(torch.uint8)  # little-endian all over
    allowed = _octet_table(logits.device).index_select(0, octets.flatten().int())
    return allowed.view(torch.bool).view(len(masks), -1)[:, : logits.shape[1]]


@functools.cache
def _octet_table(device: torch.device) -> Tensor:
    """Eight bools for each value of eight bits, as one int64: [256]."""
    bits = [[value >> bit & 1 for bit in range(8)] for value in range(256)]
    return send(bits, device, torch.uint8).view(torch.int64).flatten()
