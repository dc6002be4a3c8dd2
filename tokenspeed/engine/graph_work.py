"""Which CUDA graphs a server gets, and when.

    before it is ready   the largest of each kind, in whose memory all others find room, and the
                         decode step of one row
    later                the others, between steps while nobody waits; those first that steps have
                         missed most

A step whose graph is not there yet takes the next larger one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from tokenspeed.compile.cudagraph import GraphPool, padded_size
from tokenspeed.compile.runner import Executable
from tokenspeed.config import Config
from tokenspeed.engine.decode_graphs import DecodeGraphs
from tokenspeed.engine.piece_graphs import PieceGraphs, piece_sizes
from tokenspeed.engine.prefill_graphs import SIZES, PrefillGraphs
from tokenspeed.engine.program import Progress
from tokenspeed.engine.slots import Slots
from tokenspeed.engine.worker import Graphs
from tokenspeed.kernels.device_step import DeviceAttention
from tokenspeed.log import logger
from tokenspeed.spans import span

_PAUSE_S = 0.5
"""Between two recordings while requests run, which each holds up: by 60 ms with a model of 8B."""


class _Work(NamedTuple):
    record: Callable[[int], None]
    size: int


class GraphWork:
    """The graphs of a model on its slots, and what of them is still to be recorded."""

    def __init__(
        self, config: Config, executable: Executable, attention: DeviceAttention, slots: Slots
    ) -> None:
        settings, budget = config.compile, config.scheduler.chunked_prefill_size
        assert budget is not None, "settled by resolve"
        num_calls = sum(step.is_call for step in executable.layers.steps)
        sizes_of_pieces = piece_sizes(budget, num_calls, executable.num_weights)
        sizes_of_prompts = [size for size in SIZES if size < slots.max_len]
        if settings.disable_prefill_graph:
            sizes_of_pieces, sizes_of_prompts = (), []
        pool, sizes = GraphPool(slots.device), sorted(settings.cudagraph_capture_sizes)
        largest = max(sizes_of_pieces, default=0)
        pieces = PieceGraphs(executable, attention, slots, pool, largest)
        prefill = PrefillGraphs(executable, attention, slots, pool)
        self._decode = DecodeGraphs(executable, attention, slots, sizes, pool)
        self.graphs = Graphs(self._decode, prefill, pieces)
        self._first: list[_Work] = []
        self._later: list[_Work] = []
        for record, kind in (
            (pieces.record, sizes_of_pieces),
            (prefill.record, sizes_of_prompts),
            (self._decode.record, sizes),
        ):
            self._first += [_Work(record, size) for size in kind[-1:]]
            self._later += [_Work(record, size) for size in kind[:-1]]
        self._later.sort(key=lambda work: work.record != self._decode.record)
        if self._later and self._later[0].record == self._decode.record:
            self._first.append(self._later.pop(0))
        self._total = len(self._first) + len(self._later)
        self._last = 0.0

    @property
    def num_later(self) -> int:
        """So many graphs are still to be recorded."""
        return len(self._later)

    def record_first(self, progress: Progress) -> None:
        """What a server is not ready without."""
        self._record_all(self._first, progress)

    def record_rest(self, progress: Progress) -> None:
        """All others, now."""
        self._later, work = [], self._later
        self._record_all(work, progress)

    def may_record(self, is_idle: bool) -> bool:
        """Is there something to record, and is now the time for it?"""
        return bool(self._later) and (is_idle or time.monotonic() - self._last > _PAUSE_S)

    def record_next(self) -> None:
        """The graph that would have been of most use so far."""
        work = max(self._later, key=self._num_missed)  # the first of equals
        self._later.remove(work)
        self._record(work)
        self._last = time.monotonic()
        if not self._later:
            self._tell()

    def _num_missed(self, work: _Work) -> int:
        """Steps that would have taken it."""
        if work.record != self._decode.record:
            return 0
        sizes = sorted({*self._decode.sizes, work.size})
        counts = self._decode.seen.items()
        return sum(times for rows, times in counts if padded_size(sizes, rows) == work.size)

    def _record_all(self, all_work: list[_Work], progress: Progress) -> None:
        began = time.monotonic()
        with span("graph.capture"):
            for work in all_work:
                self._record(work)
                progress("graphs", f"{len(self.graphs)} of {self._total}")
        logger.info(
            "%d CUDA graphs in %.1f s, %d to come",
            *(len(all_work), time.monotonic() - began, len(self._later)),
        )
        if not self._later:
            self._tell()

    def _record(self, work: _Work) -> None:
        """Graphs cost no start: whoever has no memory for one does without."""
        try:
            work.record(work.size)
        except RuntimeError as error:  # the driver's own lack of memory has no class in torch
            if "out of memory" not in str(error):
                raise
            logger.debug("no graph of size %d: %s", work.size, error)

    def _tell(self) -> None:
        missing = self._total - len(self.graphs)
        if missing:
            logger.warning(
                "there was no memory for %d of %d CUDA graphs: steps of those sizes take the next "
                "larger graph or are launched kernel by kernel; a lower --gpu-memory-utilization "
                "leaves room",
                *(missing, self._total),
            )
