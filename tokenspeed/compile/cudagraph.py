"""CUDA graphs: work that is recorded once and replayed without launching anything.

A recording works on fixed tensors: what it reads is written before a replay, what it returns is
overwritten by the next. All recordings of one pool share memory, so a replay also overwrites what
another recording returned, unless somebody holds that (torch keeps what is referred to). Without
CUDA a recording is the function itself, run anew into the same tensors: the oracle of graphs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_WARMUPS = 2


def padded_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of ascending `sizes` that holds `count` rows, if one does."""
    return next((size for size in sizes if size >= count), None)


class GraphPool:
    """Memory that recordings share. Record the largest first: the others then fit into it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._handle: Any = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def recording(self) -> Iterator[torch.cuda.CUDAGraph | None]:
        """Record what is launched meanwhile; None without CUDA, where it is run. `torch.cuda.graph`
        would empty the allocator's caches each time, which takes longer than the recording.
        """
        if self._stream is None:
            yield None
            return
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(self._handle, capture_error_mode="thread_local")
            try:
                yield graph
            finally:
                graph.capture_end()


class Recording:
    """`run` recorded: `replay` does it again, into the same `results`."""

    def __init__(self, run: Callable[[], tuple[Tensor, ...]], pool: GraphPool) -> None:
        self._graph: torch.cuda.CUDAGraph | None = None
        if pool.device.type != "cuda":
            self._run = run
            self.results = run()
            return
        stream = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # kernels are compiled and workspaces made before
            for _ in range(_WARMUPS):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        with pool.recording() as self._graph:
            self.results = run()

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for kept, new in zip(self.results, self._run(), strict=True):
            kept.copy_(new)
