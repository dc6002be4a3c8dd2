"""CUDA graphs: work that is recorded once and replayed without launching anything.

A recording works on fixed tensors: what it reads is written before a replay, what it returns is
overwritten by the next. All recordings of one pool share memory, so a replay also overwrites what
another recording returned, unless somebody holds that (torch keeps what is referred to). Without
CUDA a recording is the function itself, run anew into the same tensors: the oracle of graphs.

What is run once before it is recorded runs on the current stream, as steps do: torch caches memory,
and cuBLAS its workspace of 32 MiB, for each stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

_WARMUPS = 2
_INTEGERS = {1: "|i1", 2: "<i2", 4: "<i4", 8: "<i8"}


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
        for _ in range(_WARMUPS):  # kernels are compiled and workspaces made before
            run()
        with pool.recording() as self._graph:
            self.results = run()

    def release(self, number: int) -> None:
        """Let recordings that are made later use the memory of a result, once those that read it
        are made: from then on their replays, too, overwrite it.
        """
        if self._graph is not None:
            results = [*self.results]
            results[number] = address_of(results[number])
            self.results = tuple(results)

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for kept, new in zip(self.results, self._run(), strict=True):
            kept.copy_(new)


class _Memory:
    """A tensor's place on the device, which nobody keeps."""

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": _INTEGERS[size],
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def address_of(tensor: Tensor) -> Tensor:
    """The same elements, without a claim to their memory."""
    return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)
