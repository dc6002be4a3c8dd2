"""Which CUDA graphs a server gets, and when: before it is ready, the largest first."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.compile.runner import Executable
from tokenspeed.config import CompileConfig
from tokenspeed.engine.attention import Attention
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.prefill_graphs import SIZES, PrefillGraphs
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.log import logger
from tokenspeed.spans import span


def record_graphs(
    settings: CompileConfig,
    executable: Executable,
    attention: Attention,
    slots: Slots,
    progress: Progress,
) -> Graphs | None:
    """CUDA graphs of decode steps and of small steps with prompt tokens, the largest first; None
    where there are to be none.
    """
    if (settings.level or 0) < 2 or isinstance(attention, TorchAttention):
        return None
    sizes = settings.cudagraph_capture_sizes
    began = time.monotonic()
    with span("graph.capture"):
        pool = GraphPool(slots.device)
        prefill_sizes = () if settings.disable_prefill_graph else SIZES
        prefill = PrefillGraphs(executable, attention, slots, pool)
        decode = DecodeGraphs(executable, attention, slots, sizes, pool)
        work = [(prefill.record, n) for n in reversed(prefill_sizes) if n < slots.max_len]
        work += [(decode.record, size) for size in reversed(sizes)]
        for done, (record, size) in enumerate(work, 1):
            _record_if_it_fits(record, size)
            progress("graphs", f"{done} of {len(work)}")
    graphs = Graphs(decode, prefill)
    if len(graphs) < len(work):
        logger.warning(
            "there was no memory for %d of %d CUDA graphs: steps of those sizes take the next "
            "larger graph or are launched kernel by kernel; a lower --gpu-memory-utilization "
            "leaves room",
            *(len(work) - len(graphs), len(work)),
        )
    logger.info("%d CUDA graphs in %.1f s", len(graphs), time.monotonic() - began)
    return graphs


def _record_if_it_fits(record: Callable[[int], None], size: int) -> None:
    """Graphs cost no start: whoever has no memory for one does without."""
    try:
        record(size)
    except RuntimeError as error:  # the driver's own lack of memory has no class in torch
        if "out of memory" not in str(error):
            raise
        logger.debug("no graph of size %d: %s", size, error)
