"""Paged attention by Triton kernels: for a GPU, without a plan, inside CUDA graphs or outside.

A step's lengths, tables and slots are read by the kernels, so that a captured step serves whatever
its tensors hold when it is replayed. Decodes take one launch a layer, prologue and store included;
chunks take two. Heads of up to 256 elements, also in float32; sinks
and sliding windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from tokenspeed.kernels import kv_store, paged_decode, paged_prefill
from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.attention_step import AttentionSpec, LayerGroup, Pages
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.paged_layer import PagedLayer

MAX_HEAD_DIM = 256
"""Tiles of larger heads do not fit a multiprocessor's memory."""


class TritonAttention:
    """Call `plan_device` before a step's forward; `attend` then runs each of its layers. All calls
    on one stream: layers share the workspace of split decodes.
    """

    fuses_prologue: ClassVar[bool] = True

    @classmethod
    def supports(cls, spec: AttentionSpec) -> str | None:
        """Why it cannot attend layers with this spec, or None if it can."""
        if spec.head_dim > MAX_HEAD_DIM:
            return f"its heads have {MAX_HEAD_DIM} elements at most, not {spec.head_dim}"
        return None

    def __init__(
        self,
        groups: Sequence[LayerGroup],
        pool: Pages,
        tables: Sequence[Tensor],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`tables[g]`: int32 [num_slots, max_pages], the page ids of group g's slots. `dtype`: of
        queries and results, if it is not that of the pages.
        """
        assert len(tables) == len(groups), f"{len(tables)} tables of {len(groups)} cache groups"
        self._layers: dict[int, PagedLayer] = {}
        self._workspaces: dict[int, paged_decode.Workspace] = {}
        self._step: DeviceStep | None = None
        self._decodes: DeviceStep | None = None
        self._chunks: DeviceStep | None = None
        self._results: Tensor | None = None
        widths = [group.spec.num_heads * group.spec.head_dim for group in groups]
        self._dtype = dtype or pool.keys[0].dtype
        self._result = pool.keys[0].new_empty(max(widths), dtype=self._dtype)
        for group, table in zip(groups, tables, strict=True):
            spec = group.spec
            assert (lacks := self.supports(spec)) is None, lacks
            room = paged_decode.workspace_for(
                spec.num_heads // spec.num_kv_heads, spec.head_dim, table.device
            )
            for layer in group.layers:
                self._layers[layer] = PagedLayer(
                    pool.keys[layer], pool.values[layer], table, spec.scale,
                    spec.window or 0, pool.k_scales[layer], pool.v_scales[layer],
                )  # fmt: skip
                self._workspaces[layer] = room

    def plan_device(self, step: DeviceStep, results: Tensor | None = None) -> None:
        only_decodes = step.max_query_len == 1
        self._step, self._results = step, results
        self._decodes = step if only_decodes else step.decodes() if step.num_decodes else None
        self._chunks = None if only_decodes else step.chunks()

    def room_for_results(self, num_tokens: int) -> Tensor:
        return self._result.new_empty(num_tokens * len(self._result))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """Write k and v [T, Hkv, D] into the layer's pages, attend with q [T, Hq, D] -> [T, Hq, D].
        Tokens behind the step's own, which pad a piece's input, get zeros.
        """
        return self._run(q, k, v, layer, sinks, None)

    def attend_fused(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue,
    ) -> Tensor:
        """`attend` of q and k that are still to be normed and turned."""
        return self._run(q, k, v, layer, sinks, prologue)

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        sinks: Tensor | None,
        prologue: Prologue | None,
    ) -> Tensor:
        step, paged = self._step, self._layers[layer]
        assert step is not None, "attention before plan_device"
        if self._results is None:
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        else:
            out = self._results[: q.numel()].view(q.shape)
        if self._decodes is not None:
            room = self._workspaces[layer]
            paged_decode.launch(q, k, v, paged, self._decodes, room, sinks, prologue, out)
        if self._chunks is not None:
            keys, values = self._own(k, v, layer, sinks, prologue)
            queries = kv_store.launch(q, k, v, paged, step, prologue, keys, values)
            new = (k if keys is None else keys), (v if values is None else values)
            self._attend_chunks(queries, new, layer, self._chunks, sinks, out)
        if q.shape[0] > step.num_tokens:
            out[step.num_tokens :].zero_()
        return out

    def _own(
        self, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None, prologue: Prologue | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Room for the step's keys and values where they are read elsewhere than in the pages, as
        far as they are others there than k and v.
        """
        if not self._attends_own_keys(layer, sinks):
            return None, None
        converts = self._layers[layer].converts(k.dtype)
        keys = torch.empty(k.shape, dtype=k.dtype, device=k.device)
        values = torch.empty(v.shape, dtype=v.dtype, device=v.device) if converts else None
        return (keys if converts or prologue is not None else None), values

    def _attends_own_keys(self, layer: int, sinks: Tensor | None) -> bool:
        """Does `_attend_chunks` read the step's keys and values elsewhere than in the pages?"""
        return False

    def _attend_chunks(
        self,
        queries: Tensor,
        new: tuple[Tensor, Tensor],
        layer: int,
        chunks: DeviceStep,
        sinks: Tensor | None,
        out: Tensor,
    ) -> None:
        """The rows behind the decodes, whose keys and values are in the pages: `queries` [>= T, Hq,
        D] into the same places of `out`. `new`: the step's keys and values, [>= T, Hkv, D].
        """
        paged_prefill.launch(queries, self._layers[layer], chunks, sinks, out)
