"""Which CUDA graphs a server gets, and when: before it is ready, the largest first."""

from __future__ import annotations

import time

from tokenspeed.compile.cudagraph import GraphPool, graph_sizes
from tokenspeed.compile.runner import Executable
from tokenspeed.config import CompileConfig, Config
from tokenspeed.engine.attention import Attention
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.prefill_graphs import SIZES, PrefillGraphs
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import span

_MOST_ROWS = 512
"""The largest batch that gets a CUDA graph unless asked for: larger ones gain nothing by it."""


def check_level(config: Config, model: ServedModel) -> None:
    """Raise ConfigError for -O2 where no step can be recorded."""
    if config.compile.level != 2:
        return
    if model.device.type != "cuda":
        raise ConfigError("-O2 replays CUDA graphs, and there is no CUDA device here; use -O1")
    if config.compile.attention_backend == "torch":
        raise ConfigError(
            "-O2 cannot record what --attention-backend torch computes; use triton, or -O1"
        )


def _say_what_is_void(settings: CompileConfig) -> None:
    """Options about graphs, where there are none, are not ignored in silence."""
    values = {
        "--cudagraph-capture-sizes": settings.cudagraph_capture_sizes,
        "--max-cudagraph-capture-size": settings.max_cudagraph_capture_size,
        "--disable-prefill-graph": settings.disable_prefill_graph,
    }
    if void := [name for name, value in values.items() if value]:
        logger.warning("no CUDA graphs are recorded here: %s has no effect", ", ".join(void))


def _decode_sizes(settings: CompileConfig, max_num_seqs: int) -> list[int]:
    """Batch sizes to record: those asked for, as far as the limits allow."""
    limit = min(settings.max_cudagraph_capture_size or _MOST_ROWS, max_num_seqs)
    wanted = set(settings.cudagraph_capture_sizes or graph_sizes(limit))
    if larger := sorted(size for size in wanted if size > limit):
        logger.warning("no CUDA graph of %s: steps have %d rows at most", larger, limit)
    return sorted(size for size in wanted if size <= limit)


def record_graphs(
    config: Config,
    executable: Executable,
    attention: Attention,
    slots: Slots,
    progress: Progress,
) -> Graphs | None:
    """CUDA graphs of decode steps and of small steps with prompt tokens, the largest first; None
    where there are to be none.
    """
    settings, is_cuda = config.compile, slots.device.type == "cuda"
    if settings.level in (0, 1) or not is_cuda or isinstance(attention, TorchAttention):
        _say_what_is_void(settings)
        return None
    sizes = _decode_sizes(settings, config.scheduler.max_num_seqs)
    began = time.monotonic()
    with span("graph.capture"):
        pool = GraphPool(slots.device)
        prefill_sizes = () if settings.disable_prefill_graph else SIZES
        prefill = PrefillGraphs(executable, attention, slots, prefill_sizes, pool)
        decode = DecodeGraphs(executable, attention, slots, sizes or [1], pool)
        work = [(prefill.record, size) for size in reversed(prefill.sizes)]
        work += [(decode.record, size) for size in reversed(sizes)]
        for done, (record, size) in enumerate(work, 1):
            record(size)
            progress("graphs", f"{done} of {len(work)}")
    logger.info("%d CUDA graphs in %.1f s", len(work), time.monotonic() - began)
    return Graphs(decode, prefill)
