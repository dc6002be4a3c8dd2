"""Measure which tile is best for the small linear layers of a model: seconds for its few shapes.

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

from tokenspeed.kernels import gemv
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Choice, Entry, Site, Tile, TileTable
from tokenspeed.kernels.small_linear import launch
from tokenspeed.kernels.triton_jit import AsyncCompileMode, block_of

TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Token counts that are measured; what lies between two goes with the larger."""

_MARGIN = 0.98
"""A kernel displaces the library if it takes less than this share of its time."""

_GEMV_TOKENS = 4
_REPLAYS = 7
_MIN_CALLS = 24
_SKINNY = (
    Tile("skinny", rows=16, warps=4, size=256, stages=4),
    Tile("skinny", rows=32, warps=4, size=128, stages=4),
    Tile("skinny", rows=64, warps=4, size=128, stages=3),
    Tile("skinny", rows=64, warps=4, size=64, stages=6),
    Tile("skinny", rows=128, warps=8, size=64, stages=4),
    Tile("skinny", rows=128, warps=4, size=64, stages=4),
)
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
    return replace(call, gate=site.kind == "norm_gate_up")


def candidates(site: Site, num_tokens: int) -> Iterator[Tile]:
    """What may be fast there."""
    width = 2 if site.kind == "norm_gate_up" else 1
    num_rows = site.num_rows // width
    if num_tokens <= _GEMV_TOKENS:
        yield from _gemv_candidates(site, num_rows, width)
    if num_tokens == 1 or site.dtype == "float32":
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


def tune(
    weights: Mapping[Site, Sequence[Tensor]],
    machine: str,
    tokens: Sequence[int] = TOKENS,
    on_time: Callable[[Site, int, Tile | None, float], None] | None = None,
) -> TileTable:
    """Time the library and every candidate on every site's weights: enough of them that together
    they exceed the caches. `on_time` hears microseconds a call.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        for site, ws in weights.items():
            for num_tokens in tokens:
                call = make_call(site, ws[0], num_tokens)
                for tile in candidates(site, num_tokens):
                    launch(call, tile, compile_only=True)
    entries = []
    for site, ws in weights.items():
        winners = []
        for num_tokens in tokens:
            calls = [make_call(site, w, num_tokens) for w in ws]
            times = _times(site, calls, on_time)
            times[None] *= _MARGIN
            winners.append(Choice(num_tokens, min(times, key=times.__getitem__)))
        entries.append(Entry(*site, _merged(winners)))
    return TileTable(machine, tuple(entries))


def _times(
    site: Site,
    calls: Sequence[LinearCall],
    on_time: Callable[[Site, int, Tile | None, float], None] | None,
) -> dict[Tile | None, float]:
    num_tokens = calls[0].x.shape[0]
    times: dict[Tile | None, float] = {}
    for tile in (None, *candidates(site, num_tokens)):
        try:
            times[tile] = microseconds([functools.partial(launch, call, tile) for call in calls])
        except Exception:  # a tile that the compiler refuses, or that needs too much shared memory
            continue
        if on_time is not None:
            on_time(site, num_tokens, tile, times[tile])
    return times


def microseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Of one call, on the device: the median over replays of a CUDA graph of all of them."""
    calls[0]()
    repeated = [*calls] * -(-_MIN_CALLS // len(calls))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    samples = []
    for _ in range(_REPLAYS):
        begin, end = _event(), _event()
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(begin.elapsed_time(end))
    return 1000.0 * float(statistics.median(samples)) / len(repeated)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _merged(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """Neighbours with one winner as one; the library's tail is left out."""
    found: list[Choice] = []
    for choice in choices:
        if found and found[-1].tile == choice.tile:
            found.pop()
        found.append(choice)
    if found and found[-1].tile is None:
        found.pop()
    return tuple(found)
