"""Which CUDA graphs a server gets, and when: before it is ready, the largest first."""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenspeed.compile.cudagraph import GraphPool
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.attention import Attention
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.piece_graphs import PieceGraphs, piece_sizes
from tokenspeed.engine.prefill_graphs import SIZES, PrefillGraphs
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs
from tokenspeed.kernels.attention_torch import TorchAttention
from tokenspeed.log import logger
from tokenspeed.spans import span


def record_graphs(
    config: Config,
    executable: Executable,
    attention: Attention,
    slots: Slots,
    progress: Progress,
) -> Graphs | None:
    """CUDA graphs of decode steps, of small steps with prompt tokens, and of the pieces of larger
    ones, the largest first; None where there are to be none.
    """
    settings, budget = config.compile, config.scheduler.chunked_prefill_size
    assert budget is not None, "settled by resolve"
    if (settings.level or 0) < 2 or isinstance(attention, TorchAttention):
        return None
    sizes = settings.cudagraph_capture_sizes
    began = time.monotonic()
    with span("graph.capture"):
        pool = GraphPool(slots.device)
        prefill = PrefillGraphs(executable, attention, slots, pool)
        decode = DecodeGraphs(executable, attention, slots, sizes, pool)
        num_calls = sum(step.is_call for step in executable.layers.steps)
        sizes_of_pieces = piece_sizes(budget, num_calls, executable.num_weights)
        largest = max(sizes_of_pieces, default=0)
        pieces = PieceGraphs(executable, attention, slots, pool, largest)
        work: list[tuple[Callable[[int], None], int]] = []
        if not settings.disable_prefill_graph:
            work += [(pieces.record, size) for size in reversed(sizes_of_pieces)]
            work += [(prefill.record, size) for size in reversed(SIZES) if size < slots.max_len]
        work += [(decode.record, size) for size in reversed(sizes)]
        for done, (record, size) in enumerate(work, 1):
            _record_if_it_fits(record, size)
            progress("graphs", f"{done} of {len(work)}")
    graphs = Graphs(decode, prefill, pieces)
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
