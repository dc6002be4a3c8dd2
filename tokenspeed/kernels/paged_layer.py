"""One layer's pages as kernels take them, and attention over them in plain torch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tokenspeed.kernels.device_step import DeviceStep


@dataclass(frozen=True)
class PagedLayer:
    """keys and values [num_pages, block_size, Hkv, D]; `table` int32 [num_slots, max_pages] names
    the pages of each slot. `scale` multiplies q.k; a token sees the last `window` tokens up to
    itself, or all of them (0). Pages of another dtype than q's hold keys divided by `k_scale`, and
    values by `v_scale`.
    """

    keys: Tensor
    values: Tensor
    table: Tensor
    scale: float
    window: int = 0
    k_scale: float = 1.0
    v_scale: float = 1.0

    def __post_init__(self) -> None:
        assert self.keys.shape == self.values.shape, f"{self.keys.shape} != {self.values.shape}"
        assert self.keys.is_contiguous() and self.values.is_contiguous(), "pages must lie dense"
        assert self.block_size & (self.block_size - 1) == 0, f"pages of {self.block_size} tokens"
        assert self.table.dtype == torch.int32 and self.table.stride(-1) == 1, "table of int32 rows"
        assert self.window >= 0, f"a window of {self.window} tokens"
        assert self.keys.dtype == self.values.dtype, f"{self.keys.dtype}, {self.values.dtype}"

    @property
    def block_size(self) -> int:
        return self.keys.shape[1]

    def converts(self, dtype: torch.dtype) -> bool:
        """Are numbers of `dtype` others in the pages?"""
        return self.keys.dtype != dtype


def assert_heads(
    name: str, q: Tensor, k: Tensor, v: Tensor, layer: PagedLayer, step: DeviceStep
) -> None:
    """q [>= T, Hq, D], k and v [>= T, Hkv, D] fit the layer, each other, and the step."""
    num_kv_heads, size = layer.keys.shape[2:]
    assert k.shape == v.shape == (q.shape[0], num_kv_heads, size), (
        f"{name}: q {q.shape}, k {k.shape}, v {v.shape} for pages {layer.keys.shape}"
    )
    assert q.shape[2] == size and q.shape[1] % num_kv_heads == 0, f"{name}: q {q.shape}"
    assert q.shape[0] >= step.num_tokens, f"{name}: {q.shape[0]} of {step.num_tokens} tokens"
    assert q.dtype == k.dtype == v.dtype, f"{name}: {q.dtype}, {k.dtype}, {v.dtype}"


def places_of(layer: PagedLayer, step: DeviceStep) -> Tensor:
    """int64 [T]: where each token of the step lies in the pages, counted in tokens."""
    slots = step.slots[step.token_rows.long()].long()
    pages = layer.table[slots, step.positions // layer.block_size].long()
    return pages * layer.block_size + step.positions % layer.block_size


def paged_attention_reference(
    q: Tensor, layer: PagedLayer, step: DeviceStep, sinks: Tensor | None = None
) -> Tensor:
    """Attention in float32 of q [T, Hq, D] over pages that hold the step's tokens already; `sinks`
    [Hq] adds a logit to each head's softmax, which takes weight and brings no value.
    """
    out, starts = torch.empty_like(q, memory_format=torch.contiguous_format), step.query_starts
    group = q.shape[1] // layer.keys.shape[2]
    spans = zip(starts.tolist(), starts[1:].tolist(), strict=False)
    for (begin, end), slot, length in zip(
        spans, step.slots.tolist(), step.context_lens.tolist(), strict=True
    ):
        pages = layer.table[slot, : -(-length // layer.block_size)].long()
        keys, values = (
            (x[pages].flatten(0, 1)[:length].float() * scale).repeat_interleave(group, dim=1)
            for x, scale in ((layer.keys, layer.k_scale), (layer.values, layer.v_scale))
        )
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].float(), keys) * layer.scale
        ago = (
            torch.arange(length - (end - begin), length, device=q.device)[:, None]
            - torch.arange(length, device=q.device)[None, :]
        )
        hidden = (ago < 0) | (ago >= layer.window) if layer.window else ago < 0
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            logits = sinks.float()[:, None, None].expand(-1, end - begin, 1)
            scores = torch.cat((scores, logits), -1)
        weights = scores.softmax(-1)[..., :length]
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out
