"""Which CUDA graphs a server gets, and when: before it is ready, the largest first."""

from __future__ import annotations

import time

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
        prefill = PrefillGraphs(executable, attention, slots, prefill_sizes, pool)
        decode = DecodeGraphs(executable, attention, slots, sizes, pool)
        work = [(prefill.record, size) for size in reversed(prefill.sizes)]
        work += [(decode.record, size) for size in reversed(sizes)]
        for done, (record, size) in enumerate(work, 1):
            record(size)
            progress("graphs", f"{done} of {len(work)}")
    logger.info("%d CUDA graphs in %.1f s", len(work), time.monotonic() - began)
    return Graphs(decode, prefill)
