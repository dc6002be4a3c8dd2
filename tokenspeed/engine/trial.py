"""What a start on a GPU needs beside weights and KV pages, measured before there are pages.

The largest steps are run, and the largest graph of each kind recorded, on a cache of one page, by
the attention and the worker that serve later; then all of it is given back. What counts is what
torch took from the driver meanwhile, unused parts of its blocks included: what the driver has left
also shrinks when another process takes some. What the trial leaves outside torch's memory (loaded
modules, libraries' own) is still there when the pages are counted; only for graphs, whose part of
the driver's memory comes again, it is measured too. The pages get what is left of the share of
memory that the user grants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenspeed import ledger
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.attention import PendingAttention
from tokenspeed.engine.device_kernels import has_kept_kernels
from tokenspeed.engine.graph_work import GraphWork
from tokenspeed.engine.kernel_warmup import warm_up_kernels
from tokenspeed.engine.largest_step import run_largest
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Worker
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.device_step import DeviceAttention
from tokenspeed.kernels.triton_jit import compiling_ahead
from tokenspeed.kv.pool import PagePool
from tokenspeed.kv.specs import CacheGroup
from tokenspeed.spans import span

_SLACK = 256 << 20
"""Bytes: what comes later and cannot be tried, as modules that are loaded when first used."""

_FRAGMENTS = 8
"""One part in so many more: steps of all sizes leave torch's blocks more divided than one does."""

_GRAPH = 8 << 20
"""The least bytes of the driver's for a graph, beside the memory that its kernels work in."""


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
    pending: PendingAttention,
    *,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
    vocab_size: int,
    max_model_len: int,
    progress: Progress,
) -> Needs:
    """Launch every kernel, then run and record what is largest. Raises torch.OutOfMemoryError where
    even that has no room.
    """
    progress("memory", "a trial of the largest step")
    torch.cuda.empty_cache()
    before = _used(device).by_torch
    pool = PagePool(groups, 1, config.cache.block_size, kv_dtype, device)
    slots = Slots(
        *(config.scheduler.max_num_seqs, max_model_len, len(groups), pool.block_size, device),
        scratch_page=pool.scratch_page,
    )
    if _lacks_kernels():
        progress("kernels", "compiled on all cores")
        ahead = TritonAttention(groups, pool, slots.device_tables, dtype)
        with compiling_ahead():  # which ends when all are compiled
            launch_all(config, executable, ahead, slots, groups)
    attention = pending.make(groups, pool, slots)
    assert isinstance(attention, TritonAttention), "torch's attention is not tried out"
    progress("kernels", "")
    launch_all(config, executable, attention, slots, groups)
    torch.cuda.empty_cache()
    with span("kv.trial"):
        _run_largest(config, executable, attention, slots, vocab_size)
        taken = _used(device).by_torch - before
    graphs = 0
    if (config.compile.level or 0) >= 2:
        graphs = _graph_bytes(config, executable, attention, slots)
    del attention, slots, pool
    torch.cuda.empty_cache()
    return Needs(taken + taken // _FRAGMENTS + _SLACK, graphs)


def launch_all(
    config: Config,
    executable: Executable,
    attention: DeviceAttention,
    slots: Slots,
    groups: list[CacheGroup],
) -> None:
    """Every kernel that a step may take, once."""
    assert config.scheduler.chunked_prefill_size is not None, "settled by resolve"
    with span("kernels.warmup"):
        warm_up_kernels(
            *(executable, attention, slots),
            max_rows=config.scheduler.max_num_seqs,
            token_budget=config.scheduler.chunked_prefill_size,
            num_kinds=1 + max(group.layers[0] for group in groups),
        )


def _lacks_kernels() -> bool:
    """Are there many to compile, as for a program that was compiled just now? Otherwise going
    through all of them costs more than it saves.
    """
    is_new = any(each.kind == "inductor" and each.count for each in ledger.totals())
    return is_new or not has_kept_kernels()


def _run_largest(
    config: Config,
    executable: Executable,
    attention: TritonAttention,
    slots: Slots,
    vocab_size: int,
) -> None:
    budget, max_rows = config.scheduler.chunked_prefill_size, config.scheduler.max_num_seqs
    assert budget is not None, "settled by resolve"
    worker = Worker(executable, attention, slots, vocab_size=vocab_size, eos_ids=frozenset())
    run_largest(worker, max_rows=max_rows, token_budget=budget, vocab_size=vocab_size)


def _graph_bytes(
    config: Config, executable: Executable, attention: TritonAttention, slots: Slots
) -> int:
    """The largest of each kind share their memory with all others, which then cost what one more
    does.
    """
    device = slots.device
    before = _used(device)
    work = GraphWork(config, executable, attention, slots)
    work.record_first(lambda phase, detail: None)
    after_first, num_later = _used(device), work.num_later
    later = Used(0, 0)
    if num_later:
        with span("graph.capture"):
            work.record_next()
        later = _used(device).less(after_first)
    first, count = after_first.less(before), len(work.graphs) + work.num_later
    outside = first.outside + later.outside * num_later
    return first.by_torch + later.by_torch * num_later + max(outside, _GRAPH * count)


class Used(NamedTuple):
    """Bytes of the device: what torch's tensors and graphs of this process have, or have had, and
    all others.
    """

    by_torch: int
    outside: int

    def less(self, before: Used) -> Used:
        return Used(self.by_torch - before.by_torch, self.outside - before.outside)


def _used(device: torch.device) -> Used:
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    by_torch = torch.cuda.memory_reserved(device)
    return Used(by_torch, total - free - by_torch)
