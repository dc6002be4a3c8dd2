"""What stands for FlashInfer on a CPU: wrappers that attend, in plain torch, what was planned."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tokenspeed.kernels import kv_store, paged_decode, paged_prefill
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.paged_layer import PagedLayer, paged_attention_reference


class FakeRagged:
    """Keeps the starts of its last plan, and counts its runs."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.num_runs = 0

    def plan(
        self, qo_indptr: Tensor, kv_indptr: Tensor, *numbers: int, causal: bool, sm_scale: float,
        q_data_type: torch.dtype,
    ) -> None:  # fmt: skip
        assert causal and qo_indptr.dtype == torch.int32 and torch.equal(qo_indptr, kv_indptr)
        self.starts, self.numbers, self.scale = qo_indptr.tolist(), numbers, sm_scale

    def run(self, q: Tensor, k: Tensor, v: Tensor, *, out: Tensor) -> Tensor:
        assert len(q) == len(k) == len(v) == self.starts[-1] and out.shape == q.shape
        for begin, end in itertools.pairwise(self.starts):
            own = slice(begin, end)
            heads = (each[own].transpose(0, 1) for each in (q, k, v))
            result = F.scaled_dot_product_attention(
                *heads, is_causal=True, scale=self.scale, enable_gqa=True
            )
            out[own] = result.transpose(0, 1)
        self.num_runs += 1
        return out


class FakePrefill:
    """Keeps the arguments of its last plan by name, and counts its runs."""

    def __init__(self) -> None:
        self.planned = SimpleNamespace()
        self.num_runs = 0

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        *numbers: int,
        seq_lens: Tensor,
        **options: Any,
    ) -> None:
        ints = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, seq_lens)
        assert all(each.dtype == torch.int32 and each.device.type == "cpu" for each in ints)
        starts, pages, indices, last, lengths = (each.tolist() for each in ints)
        self.planned = SimpleNamespace(
            starts=starts, page_starts=pages, pages=indices, last=last, lengths=lengths,
            numbers=numbers, options=options,
        )  # fmt: skip

    def run(
        self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, k_scale: float, v_scale: float,
        out: Tensor,
    ) -> Tensor:  # fmt: skip
        """As FlashInfer, which goes by last page lengths."""
        plan, size = self.planned, paged_kv_cache[0].shape[1]
        assert plan.options["causal"] and q.shape[0] == plan.starts[-1] and out.shape == q.shape
        rows = range(len(plan.last))
        counts = [plan.page_starts[i + 1] - plan.page_starts[i] for i in rows]
        lengths = [(counts[i] - 1) * size + plan.last[i] for i in rows]
        assert lengths == plan.lengths
        table = torch.zeros(len(rows), max(counts), dtype=torch.int32)
        for i in rows:
            table[i, : counts[i]] = torch.tensor(plan.pages[plan.page_starts[i] :][: counts[i]])
        scale = plan.options["sm_scale"]
        layer = PagedLayer(*paged_kv_cache, table, scale, 0, k_scale, v_scale)
        assert plan.options["kv_data_type"] == layer.keys.dtype
        out.copy_(paged_attention_reference(q, layer, _step(plan.starts, lengths)))
        self.num_runs += 1
        return out


def _step(starts: list[int], lengths: list[int]) -> DeviceStep:
    counts = [b - a for a, b in itertools.pairwise(starts)]
    owners = [i for i, count in enumerate(counts) for _ in range(count)]
    return DeviceStep(
        num_rows=len(lengths),
        num_tokens=starts[-1],
        max_query_len=max(counts),
        max_context_len=max(lengths),
        slots=torch.arange(len(lengths), dtype=torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        token_rows=torch.tensor(owners, dtype=torch.int32),
    )


def replace_kernels(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """Let references do the work of the Triton kernels; (tokens, sinks or not) of each launch of
    the prefill kernel.
    """
    prefills: list[tuple[int, bool]] = []

    def prefill(
        q: Tensor, layer: PagedLayer, step: DeviceStep, sinks: Tensor | None, out: Tensor
    ) -> None:
        begin, end = step.query_starts[0], step.query_starts[-1]
        prefills.append((int(end - begin), sinks is not None))
        out[begin:end] = paged_attention_reference(q, layer, step, sinks)[begin:end]

    def decode(
        q: Tensor, k: Tensor, v: Tensor, layer: PagedLayer, step: DeviceStep, room: object,
        sinks: Tensor | None, prologue: Any, out: Tensor,
    ) -> None:  # fmt: skip
        n = step.num_tokens
        out[:n] = paged_decode.reference(q, k, v, layer, step, sinks, prologue)[:n]

    monkeypatch.setattr(kv_store, "launch", kv_store.reference)
    monkeypatch.setattr(paged_prefill, "launch", prefill)
    monkeypatch.setattr(paged_decode, "launch", decode)
    return prefills
