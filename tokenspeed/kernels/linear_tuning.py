"""Measure which tile, or which algorithm of the library, is best for a model's linear layers on
CUDA: half a minute for the nine shapes of Qwen3 at fourteen token counts.

A candidate is timed inside a CUDA graph, on the weights of many layers in turn: a step reads every
weight once, so a kernel must be timed on weights that have left the caches. All candidates are
compiled first, in parallel. Whatever a table says, results differ by float rounding at most.
"""

from __future__ import annotations

import functools
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from tokenspeed.kernels import cublas_lt, gated, gemv
from tokenspeed.kernels.linear import launch
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import (
    MAX_TOKENS,
    Algorithm,
    Choice,
    Entry,
    Site,
    Tile,
    TileTable,
    Way,
)
from tokenspeed.kernels.triton_jit import AsyncCompileMode, block_of

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
"""Token counts that are measured; what lies between two goes with the larger, and what lies above
with the last.
"""

_SKINNY_TOKENS = 256
"""More are the library's: matrix units then decide, not the memory's speed."""

_GATED = (
    Tile("gated", rows=128, warps=8, size=64, tokens=128, stages=4),
    Tile("gated", rows=64, warps=8, size=64, tokens=256, stages=4),
    Tile("gated", rows=64, warps=8, size=64, tokens=128, stages=6),
)
_GATED_TOKENS = 128
"""From here on."""

_MARGIN = 0.98
"""Another way displaces torch's if it takes less than this share of its time."""

_GEMV_TOKENS = 4
_ROUNDS = 7
_ROUND_US = 1000.0
"""Of one candidate, about."""
_SKINNY = (
    Tile("skinny", rows=16, warps=4, size=256, stages=4),
    Tile("skinny", rows=32, warps=4, size=128, stages=4),
    Tile("skinny", rows=64, warps=4, size=128, stages=3),
    Tile("skinny", rows=64, warps=4, size=64, stages=6),
    Tile("skinny", rows=128, warps=8, size=64, stages=4),
    Tile("skinny", rows=128, warps=4, size=64, stages=4),
)
_GATES = ("norm_gate_up", "gate_up")
_WEIGHT_BYTES = 256 << 20
"""More than the caches of any GPU hold."""

_ENOUGH_PROGRAMS = 264
"""For a device of 132 multiprocessors: with fewer, programs may share the columns."""


def made_up_weights(site: Site, device: torch.device) -> list[Tensor]:
    """Weights [N, K] about as large as a model's, enough of them that together they exceed the
    caches.
    """
    dtype: torch.dtype = getattr(torch, site.dtype)
    shape = (site.num_rows, site.size)
    count = max(2, -(-_WEIGHT_BYTES // (dtype.itemsize * site.num_rows * site.size)))
    scale = site.size**-0.5
    return [torch.randn(shape, device=device, dtype=dtype) * scale for _ in range(count)]


def make_call(site: Site, w: Tensor, num_tokens: int) -> LinearCall:
    """A site's call with random operands."""
    x = torch.randn(num_tokens, site.size, dtype=w.dtype, device=w.device)
    call = LinearCall(x, w)
    if site.kind.startswith("norm"):
        call = replace(call, norm=torch.randn_like(x[0]), eps=1e-6)
    if site.kind == "linear_add":
        return replace(call, residual=x.new_empty(num_tokens, site.num_rows).normal_())
    return replace(call, gate=site.kind in _GATES)


def candidates(site: Site, num_tokens: int) -> Iterator[Tile]:
    """What may be fast there."""
    width = 2 if site.kind in _GATES else 1
    num_rows = site.num_rows // width
    if num_tokens <= _GEMV_TOKENS:
        yield from _gemv_candidates(site, num_rows, width)
    if num_tokens == 1 or site.dtype == "float32":
        return
    if site.kind == "gate_up" and num_tokens >= _GATED_TOKENS:
        yield from _GATED
    if num_tokens > _SKINNY_TOKENS:
        return
    sizes = [min(64, max(16, block_of(num_tokens))), *([128] if num_tokens > 64 else [])]
    for tile, tokens in itertools.product(_SKINNY, sizes):
        num_programs = -(-num_rows // tile.rows) * -(-num_tokens // tokens)
        for splits in (1, 2, 4, 8):
            if splits > 1 and num_programs * (splits // 2) >= _ENOUGH_PROGRAMS:
                break
            if site.size // splits >= tile.size:
                yield msgspec.structs.replace(tile, tokens=tokens, splits=splits)


def _gemv_candidates(site: Site, num_rows: int, width: int) -> Iterator[Tile]:
    whole = block_of(site.size)
    for rows, warps in itertools.product((1, 2, 4), (4, 8)):
        if site.size <= gemv.MAX_WHOLE and 8 <= rows * width * whole // (32 * warps) <= 128:
            for repeats in (1, 2, 4, 8):
                if repeats == 1 or num_rows // (rows * repeats) >= _ENOUGH_PROGRAMS:
                    yield Tile("gemv", rows, warps, whole, repeats)
    if not site.kind.startswith("norm"):
        for rows, warps, size in itertools.product(
            (1, 2, 4), (1, 2, 4, 8), (512, 1024, 2048, 4096)
        ):
            if size < site.size and 8 <= rows * size // (32 * warps) <= 64:
                yield Tile("gemv", rows, warps, size)


OnTime = Callable[[Site, int, Way, float], None]


def tune(
    weights: Mapping[Site, Sequence[Tensor]],
    machine: str,
    tokens: Sequence[int] = TOKENS,
    on_time: OnTime | None = None,
) -> TileTable:
    """Time the library and every candidate on every site's weights: enough of them that together
    they exceed the caches. `on_time` hears microseconds a call.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for site, ws in weights.items():
            for num_tokens in tokens:
                call = make_call(site, ws[0], num_tokens)
                for tile in _runnable(site, call):
                    launch(call, tile, compile_only=True)
    entries = []
    for site, ws in weights.items():
        winners = []
        for num_tokens in tokens:
            times = _times(site, [make_call(site, w, num_tokens) for w in ws])
            if on_time is not None:
                for way, microseconds in times.items():
                    on_time(site, num_tokens, way, microseconds)
            times[None] *= _MARGIN
            winners.append(Choice(num_tokens, min(times, key=times.__getitem__)))
        entries.append(Entry(*site, _merged(winners)))
    return TileTable(machine, tuple(entries))


def _runnable(site: Site, call: LinearCall) -> list[Tile]:
    tiles = candidates(site, call.x.shape[0])
    return [tile for tile in tiles if tile.kernel != "gated" or gated.serves(call)]


def _times(site: Site, calls: Sequence[LinearCall]) -> dict[Way, float]:
    """Of torch's way first, of tiles, and of the library's algorithms, in rounds of all of them."""
    ways: list[Way] = [None, *_runnable(site, calls[0])]
    ways += cublas_lt.proposals(calls[0].x, calls[0].w)
    timed = {}
    for way in ways:
        try:
            timed[way] = Timed([functools.partial(launch, call, way) for call in calls])
        except Exception:  # a tile that the compiler refuses, or that needs too much shared memory
            continue
    samples: dict[Way, list[float]] = {way: [] for way in timed}
    for _ in range(_ROUNDS):
        for way, each in timed.items():
            samples[way].append(each.microseconds())
    return {way: statistics.median(found) for way, found in samples.items()}


class Timed:
    """Calls in a CUDA graph, again and again for about a millisecond."""

    def __init__(self, calls: Sequence[Callable[[], object]]) -> None:
        """What raises on its first call raises here."""
        calls[0]()
        self._graph, self._count = _recorded(calls), len(calls)
        once = self.microseconds()
        repeats = int(_ROUND_US / (len(calls) * once))
        if repeats > 1:
            self._graph, self._count = _recorded([*calls] * repeats), len(calls) * repeats

    def microseconds(self) -> float:
        """Of one call, on the device, now."""
        begin, end = _event(), _event()
        begin.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        return 1000.0 * float(begin.elapsed_time(end)) / self._count


def _recorded(calls: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on the device: the median over rounds."""
    timed = Timed(calls)
    return statistics.median(timed.microseconds() for _ in range(_ROUNDS))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _merged(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Neighbours with one winner as one; torch's tail is left out, that of others that are for many
    tokens goes on.
    """
    found: list[Choice] = []
    for choice in choices:
        if found and found[-1].way == choice.way:
            found.pop()
        found.append(choice)
    if found and found[-1].way is None:
        found.pop()
    elif found and _is_for_many(found[-1].way):
        found.append(msgspec.structs.replace(found.pop(), max_tokens=MAX_TOKENS))
    return tuple(found)


def _is_for_many(way: Way) -> bool:
    return isinstance(way, Algorithm) or (isinstance(way, Tile) and way.kernel == "gated")
