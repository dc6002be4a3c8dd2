"""What a start on a GPU needs beside weights and KV pages, measured before there are pages.

The largest step is run, and the largest graph of each kind recorded, on a cache of one page; then
all of it is given back. What counts is what torch took from the driver meanwhile: what the driver
has left also shrinks when another process takes some. The pages get what is left of the share of
memory that the user grants.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenspeed import ledger
from tokenspeed.batch import forward_context
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.device_kernels import has_kept_kernels
from tokenspeed.engine.graph_work import GraphWork
from tokenspeed.engine.kernel_warmup import warm_up_kernels
from tokenspeed.engine.piece_graphs import scratch_rows
from tokenspeed.engine.pinned import send
from tokenspeed.engine.prefill_graphs import device_step
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.triton_jit import compiling_ahead
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.spans import span

_SLACK = 256 << 20
"""Bytes: what comes later and cannot be tried, as FlashInfer's workspaces and fragmentation."""

_GRAPH = 8 << 20
"""Bytes of the driver's for a graph, beside the memory that its kernels work in."""


@dataclass(frozen=True)
class Needs:
    """In bytes."""

    activations: int = 0
    """Of the largest step, with the state of all requests, and some slack."""
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.graphs


@torch.inference_mode()
def try_out(
    config: Config,
    executable: Executable,
    groups: list[CacheGroup],
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    max_model_len: int,
    progress: Progress,
) -> Needs:
    """Run and record what is largest. Raises torch.OutOfMemoryError where even that has no room."""
    progress("memory", "a trial of the largest step")
    torch.cuda.empty_cache()
    before = _taken(device)
    pool = PagePool(groups, 1, config.cache.block_size, kv_dtype, device)
    slots = Slots(
        *(config.scheduler.max_num_seqs, max_model_len, len(groups), pool.block_size, device),
        scratch_page=pool.scratch_page,
    )
    attention = TritonAttention(groups, pool, slots.device_tables, dtype)
    if _lacks_kernels():
        progress("kernels", "compiled on all cores")
        with span("kernels.warmup"), compiling_ahead():  # which ends when all are compiled
            warm_up_kernels(
                *(executable, attention, slots),
                max_rows=config.scheduler.max_num_seqs,
                token_budget=config.scheduler.chunked_prefill_size or 1,
                num_kinds=1 + max(group.layers[0] for group in groups),
            )
    with span("kv.trial"):
        _run_largest(config, executable, attention, slots)
        activations = _taken(device) - before + _SLACK
    graphs = 0
    if (config.compile.level or 0) >= 2:
        graphs = _graph_bytes(GraphWork(config, executable, attention, slots), device)
    del attention, slots, pool
    torch.cuda.empty_cache()
    return Needs(activations, graphs)


def _lacks_kernels() -> bool:
    """Are there many to compile, as for a program that was compiled just now? Otherwise going
    through all of them costs more than it saves.
    """
    is_new = any(each.kind == "inductor" and each.count for each in ledger.totals())
    return is_new or not has_kept_kernels()


def _run_largest(
    config: Config, executable: Executable, attention: TritonAttention, slots: Slots
) -> None:
    """A step of all tokens, every one of whose results is asked for, then logits of all rows."""
    budget, max_rows = config.scheduler.chunked_prefill_size, config.scheduler.max_num_seqs
    assert budget is not None, "settled by resolve"
    query = slots.query(send(scratch_rows(slots, budget), slots.device), budget)
    attention.plan_device(device_step(query, query.slots.shape[0], budget, slots.max_len))
    with forward_context(attention):
        hidden = executable.forward(executable.embed(query.ids), query.positions)
    rows = torch.zeros(max_rows, dtype=torch.int64, device=slots.device)
    logits = executable.head(hidden[rows]).float()
    logits.clone().masked_fill_(logits > 0, 0.0)  # as penalties, bias and masks do


def _graph_bytes(work: GraphWork, device: torch.device) -> int:
    """The largest of each kind share their memory with all others, which then cost what one more
    does.
    """
    before = _taken(device)
    work.record_first(lambda phase, detail: None)
    after_first, num_later = _taken(device), work.num_later
    each = 0
    if num_later:
        with span("graph.capture"):
            work.record_next()
        each = _taken(device) - after_first
    return after_first - before + each * num_later + _GRAPH * (len(work.graphs) + work.num_later)


def _taken(device: torch.device) -> int:
    """Bytes of the device that this process's tensors and graphs have, or have had."""
    torch.cuda.synchronize(device)
    return torch.cuda.memory_reserved(device)
