"""What stands on the device: pages, slots, attention, CUDA graphs, and the worker that has them.
What comes before the pages has launched every kernel of a GPU's (`trial.py`).
"""

from __future__ import annotations

import torch

from tokenspeed.attention_backends import uses_triton
from tokenspeed.compile.runner import Executable
from tokenspeed.engine.attention import PendingAttention
from tokenspeed.engine.graph_work import GraphWork
from tokenspeed.engine.memory import SHORTEST, count_pages
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.trial import Needs, launch_all, try_out
from tokenspeed.engine.worker import Worker
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.kv.pool import PagePool, bytes_per_page
from tokenspeed.kv.specs import CacheGroup, LayerScales
from tokenspeed.log import logger

_MIB = 1 << 20
_GIB = 1 << 30
_BLOCK = 2 << 20


def build_pool(
    model: ServedModel,
    executable: Executable,
    pending: PendingAttention,
    groups: list[CacheGroup],
    scales: LayerScales | None,
    asked_model_len: int | None,
    progress: Progress,
) -> PagePool:
    """The pool; it has to hold one request of the length that was asked for, if one was. `scales`:
    of each layer's keys and values in fp8, as the checkpoint has them. Raises ConfigError if it
    cannot.
    """
    config, needs = model.settings, _needs(model, executable, pending, groups, progress)
    block_size = config.cache.block_size
    page_bytes = bytes_per_page(groups, block_size, model.kv_dtype)
    num_pages = count_pages(
        config.cache,
        page_bytes,
        useful_tokens=config.scheduler.max_num_seqs * model.config.max_model_len,
        needed_tokens=asked_model_len or SHORTEST,
        device=model.device,
        reserved=needs.total + _rounding(groups, model.device),
    )
    scales = _settle_scales(scales, config.cache.kv_cache_dtype)
    pool = PagePool(groups, num_pages, block_size, model.kv_dtype, model.device, scales)
    how = "taken as it fills, at most" if model.device.type == "cpu" else "taken now"
    logger.info(
        "kv cache: room for %d tokens in %d pages of %s; memory is %s: %d MiB (--max-total-tokens)",
        *(num_pages * block_size, num_pages, config.cache.kv_cache_dtype),
        *(how, num_pages * page_bytes // _MIB),
    )
    return pool


def _rounding(groups: list[CacheGroup], device: torch.device) -> int:
    """Bytes: torch takes whole blocks of the driver's for the keys and the values of each layer."""
    if device.type != "cuda":
        return 0
    return 2 * sum(len(group.layers) for group in groups) * _BLOCK


def _settle_scales(scales: LayerScales | None, cache_dtype: str) -> LayerScales | None:
    """Those that the cache is written with: None where all are 1."""
    if not cache_dtype.startswith("fp8"):
        if scales is not None:
            logger.info("the checkpoint's scales are for an fp8 cache: not used, all are 1")
        return None
    if scales is None:
        logger.info("kv cache: the checkpoint has no scales for fp8: all are 1")
        return None
    every = [scale for pair in scales for scale in pair]
    logger.info("kv cache: the checkpoint's scales, %.3g to %.3g", min(every), max(every))
    return scales


def _needs(
    model: ServedModel,
    executable: Executable,
    pending: PendingAttention,
    groups: list[CacheGroup],
    progress: Progress,
) -> Needs:
    """What pages must leave room for: measured on a GPU, where memory is the engine's own."""
    settings = model.settings
    if model.device.type != "cuda" or not uses_triton(settings.compile.attention_backend):
        return Needs()
    needs = try_out(
        *(settings, executable, groups, pending),
        dtype=model.dtype,
        kv_dtype=model.kv_dtype,
        device=model.device,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_model_len,
        progress=progress,
    )
    free, total = torch.cuda.mem_get_info(model.device)
    outside = int((1.0 - settings.cache.gpu_memory_utilization) * total)
    logger.info(
        "memory of %.1f GiB: %.1f in use with the weights, %.1f for the largest step, %.1f for "
        "CUDA graphs, %.1f left alone, %.1f for the kv cache",
        *(total / _GIB, (total - free) / _GIB, needs.activations / _GIB, needs.graphs / _GIB),
        *(outside / _GIB, max(0, free - outside - needs.total) / _GIB),
    )
    return needs


def build_worker(
    model: ServedModel,
    executable: Executable,
    pending: PendingAttention,
    groups: list[CacheGroup],
    pool: PagePool,
    *,
    max_model_len: int,
    eos_ids: frozenset[int],
    progress: Progress,
) -> tuple[Worker, GraphWork | None]:
    """The worker, and what there is to do about CUDA graphs, of which it has the first."""
    config, device, vocab_size = model.settings, model.device, model.config.vocab_size
    slots = Slots(
        *(config.scheduler.max_num_seqs, max_model_len, len(groups), pool.block_size, device),
        scratch_page=pool.scratch_page,
    )
    attention = pending.result(groups, pool, slots)
    work: GraphWork | None = None
    if not isinstance(attention, TorchAttention) and device.type == "cuda":
        if max_model_len != model.config.max_model_len:  # the trial had tables of another length
            launch_all(config, executable, attention, slots, groups)
        if (config.compile.level or 0) >= 2:
            work = GraphWork(config, executable, attention, slots)
            work.record_first(progress)
        torch.cuda.empty_cache()  # steps divide whole blocks among them, as the trial's did
    worker = Worker(
        *(executable, attention, slots),
        vocab_size=vocab_size,
        eos_ids=eos_ids,
        graphs=None if work is None else work.graphs,
    )
    return worker, work
