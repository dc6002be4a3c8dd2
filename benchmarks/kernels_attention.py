"""Attention kernels on one GPU: decode and prefill over pages, beside FlashInfer and the floor.

    python benchmarks/kernels_attention.py [--kv-cache-dtype fp8_e4m3] [--out RESULT.json]

decode    prologue (QK-norm, RoPE), KV store and attention of one token a row: `paged_decode`, one
          launch. FlashInfer (tensor cores, planned ahead) does the attention alone. Floor: the
          cache's bytes at the speed of an 8 GiB copy.
prefill   causal chunks with and without a past: `kv_store` and `paged_prefill`, two launches.
          FlashInfer (FA3; over fp8, FA2) does the attention alone. Floor: its FLOPs at the speed of
          a matmul.
anew      rows without a past, to their own keys and values: `hopper_prefill`, attention alone, and
          FlashInfer's (FA3), both planned ahead. The same floor. On Hopper only.

All in bfloat16, but for pages, if so asked; pages of 16 tokens, shuffled. Times are medians of
graph replays divided by the layers in the graph, each with a cache of its own, together larger than
the L2 cache.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tokenspeed.bench.machine import facts, gpu_speed
from tokenspeed.kernels.attend import Prologue
from tokenspeed.kernels.attention_flashinfer import RaggedPrefill
from tokenspeed.kernels.attention_triton import TritonAttention
from tokenspeed.kernels.device_step import DeviceStep
from tokenspeed.kernels.gluon_jit import runs_gluon
from tokenspeed.kernels.hopper_planned import HopperPrefill
from tokenspeed.kv.pool import KV_DTYPES, PagePool
from tokenspeed.kv.specs import FullAttention, cache_groups

try:
    import flashinfer
except ImportError:
    flashinfer = None

CUDA = torch.device("cuda")
BF16 = torch.bfloat16
PAGE = 16
ROTATED_BYTES = 256 << 20
MAX_LAYERS = 200
REPLAYS = 15
QWEN_8B, QWEN_06B = (32, 8, 128), (16, 8, 128)


@dataclass(frozen=True)
class Workload:
    """`num_rows` rows of `query_len` new tokens, the last of `context_len`."""

    num_rows: int
    query_len: int
    context_len: int
    heads: tuple[int, int, int] = QWEN_8B
    max_context_len: int = 0
    """What the host knows, where that is more."""
    kv_dtype: torch.dtype = BF16

    @property
    def name(self) -> str:
        bound = f", bound {self.max_context_len}" if self.max_context_len else ""
        sizes = f"{self.query_len} of {self.context_len}{bound}"
        return f"{self.num_rows} x {sizes}, {self.heads[0]}/{self.heads[1]} of {self.heads[2]}"

    @property
    def cache_bytes(self) -> int:
        _, num_kv_heads, size = self.heads
        return 2 * self.kv_dtype.itemsize * self.num_rows * self.context_len * num_kv_heads * size

    @property
    def flops(self) -> int:
        num_heads, _, size = self.heads
        past = self.context_len - self.query_len
        seen = self.query_len * past + self.query_len * (self.query_len + 1) // 2
        return 4 * self.num_rows * seen * num_heads * size


DECODES = (
    Workload(1, 1, 256),
    Workload(1, 1, 256, max_context_len=32768),
    Workload(1, 1, 256, QWEN_06B),
    Workload(1, 1, 8192),
    Workload(8, 1, 1024),
    Workload(64, 1, 2048),
    Workload(64, 1, 2048, max_context_len=32768),
    Workload(256, 1, 512),
    Workload(256, 1, 1152),
)
PREFILLS = (
    Workload(4, 2048, 2048),
    Workload(1, 8192, 8192),
    Workload(1, 2048, 8192),
    Workload(16, 128, 1024),
)
ANEW = (
    Workload(1, 8192, 8192),
    Workload(2, 4096, 4096),
    Workload(4, 2048, 2048),
    Workload(8, 1024, 1024),
    Workload(64, 128, 128),
)


class Bench:
    """One workload's caches, tables and operands."""

    def __init__(self, work: Workload) -> None:
        num_heads, num_kv_heads, size = work.heads
        self.work = work
        self.num_layers = min(max(2, ROTATED_BYTES // work.cache_bytes), MAX_LAYERS)
        spec = FullAttention(
            num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=size, scale=size**-0.5
        )
        self.groups = cache_groups([spec] * self.num_layers)
        pages = -(-work.context_len // PAGE)
        self.pool = PagePool(self.groups, work.num_rows * pages, PAGE, work.kv_dtype, CUDA)
        for cache in (*self.pool.keys, *self.pool.values):
            cache.copy_(torch.randn(cache.shape, device=CUDA))
        order = torch.randperm(work.num_rows * pages, device=CUDA).int()
        self.table = order.view(work.num_rows, pages)
        tokens = work.num_rows * work.query_len
        widths = [n * size for n in (num_heads, num_kv_heads, num_kv_heads)]
        merged = torch.randn(tokens, sum(widths), dtype=BF16, device=CUDA)
        self.q, self.k, self.v = (x.unflatten(-1, (-1, size)) for x in merged.split(widths, -1))
        angles = torch.randn(tokens, 1, size // 2, device=CUDA)
        weight = torch.ones(size, dtype=BF16, device=CUDA)
        self.prologue = Prologue(weight, weight, angles.cos(), angles.sin(), 1e-6)
        self.attention = TritonAttention(self.groups, self.pool, [self.table], BF16)
        self.attention.plan_device(self._step())

    def _step(self) -> DeviceStep:
        work, rows = self.work, torch.arange(self.work.num_rows, dtype=torch.int32, device=CUDA)
        positions = torch.arange(work.context_len - work.query_len, work.context_len, device=CUDA)
        return DeviceStep(
            num_rows=work.num_rows,
            num_tokens=work.num_rows * work.query_len,
            max_query_len=work.query_len,
            max_context_len=max(work.context_len, work.max_context_len),
            slots=rows,
            query_starts=torch.arange(work.num_rows + 1, dtype=torch.int32, device=CUDA)
            * work.query_len,
            context_lens=torch.full_like(rows, work.context_len),
            positions=positions.repeat(work.num_rows),
            token_rows=rows.repeat_interleave(work.query_len),
        )

    def ours(self, layer: int) -> Tensor:
        return self.attention.attend_fused(self.q, self.k, self.v, layer, None, self.prologue)

    def flashinfer(self) -> Callable[[int], Tensor]:
        """Attention alone, planned."""
        work, (num_heads, num_kv_heads, size) = self.work, self.work.heads
        pages = self.table.shape[1]
        starts = torch.arange(work.num_rows + 1, dtype=torch.int32, device=CUDA)
        last = torch.full((work.num_rows,), (work.context_len - 1) % PAGE + 1, device=CUDA).int()
        room = torch.empty(256 << 20, dtype=torch.uint8, device=CUDA)
        indices = self.table.flatten()
        types = {"q_data_type": BF16, "kv_data_type": work.kv_dtype}
        if work.query_len == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                room, "NHD", use_tensor_cores=True
            )
            plan = (starts * pages, indices, last, num_heads, num_kv_heads, size, PAGE)
            wrapper.plan(*plan, **types)
        else:
            backend = "fa3" if work.kv_dtype == BF16 else "fa2"
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(room, "NHD", backend=backend)
            starts_q = starts * work.query_len
            plan = (starts_q, starts * pages, indices, last, num_heads, num_kv_heads, size, PAGE)
            wrapper.plan(*plan, causal=True, **types)
        q = self.q.contiguous()
        return lambda layer: wrapper.run(q, (self.pool.keys[layer], self.pool.values[layer]))

    def anew(self, prefill: RaggedPrefill) -> Callable[[int], Tensor]:
        """Attention to the step's own keys, planned."""
        work, (num_heads, num_kv_heads, size) = self.work, self.work.heads
        starts = torch.arange(work.num_rows + 1, dtype=torch.int32) * work.query_len
        prefill.plan(
            starts, starts, num_heads, num_kv_heads, size,
            causal=True, sm_scale=size**-0.5, q_data_type=BF16,
        )  # fmt: skip
        out = torch.empty(self.q.shape, dtype=BF16, device=CUDA)

        def run(layer: int) -> Tensor:
            prefill.run(self.q, self.k, self.v, out=out)
            return out

        return run

    def microseconds(self, call: Callable[[int], Tensor]) -> float:
        """Of one layer: the median of graph replays that run each layer once."""
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for layer in range(self.num_layers):
                call(layer)
        graph.replay()
        return statistics.median(_seconds(graph.replay) for _ in range(REPLAYS)) / (
            self.num_layers / 1e6
        )


def _seconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def measure(work: Workload, machine: dict[str, Any]) -> dict[str, Any]:
    bench = Bench(work)
    ours = bench.microseconds(bench.ours)
    result: dict[str, Any] = {"ours_us": round(ours, 2)}
    if flashinfer is not None:
        try:
            result["flashinfer_us"] = round(bench.microseconds(bench.flashinfer()), 2)
        except (RuntimeError, ValueError) as error:
            result["flashinfer_error"] = str(error)[:200]
    if work.query_len == 1:
        result["floor_us"] = round(work.cache_bytes / machine["copy_tb_s"] / 1e6, 2)
        result["ours_tb_s"] = round(work.cache_bytes / ours / 1e6, 2)
    else:
        result["floor_us"] = round(work.flops / machine["matmul_tflop_s"] / 1e6, 2)
        result["ours_tflop_s"] = round(work.flops / ours / 1e6, 1)
    return result


def measure_anew(work: Workload, machine: dict[str, Any]) -> dict[str, Any]:
    bench = Bench(work)
    makes: dict[str, Callable[[], RaggedPrefill]] = {"ours": lambda: HopperPrefill(CUDA)}
    if flashinfer is not None:
        room = torch.empty(1 << 16, dtype=torch.uint8, device=CUDA)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper
        makes["flashinfer"] = lambda: wrapper(room, "NHD", backend="fa3")
    result: dict[str, Any] = {}
    for name, make in makes.items():
        took = bench.microseconds(bench.anew(make()))
        result[f"{name}_us"] = round(took, 2)
        result[f"{name}_tflop_s"] = round(work.flops / took / 1e6, 1)
    result["floor_us"] = round(work.flops / machine["matmul_tflop_s"] / 1e6, 2)
    return result


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kv-cache-dtype", choices=KV_DTYPES, default="bfloat16")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    machine = facts() | gpu_speed()
    report: dict[str, Any] = {"machine": machine, "kv_cache_dtype": args.kv_cache_dtype}
    kinds = [("decode", DECODES, measure), ("prefill", PREFILLS, measure)]
    if runs_gluon(CUDA):
        kinds.append(("anew", ANEW, measure_anew))
    for kind, works, measured in kinds:
        report[kind] = {}
        for each in works:
            work = replace(each, kv_dtype=KV_DTYPES[args.kv_cache_dtype])
            report[kind][work.name] = measured(work, machine)
            print(kind, work.name, report[kind][work.name], flush=True)
            torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
