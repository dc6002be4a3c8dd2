"""Prefill on Hopper: here the kernel is compiled for that GPU, and how its work is shared out is
checked. Its results are compared in tests/gpu.
"""

from __future__ import annotations

import heapq
import itertools
import subprocess
import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from gluon_program import Kernel, Place
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenspeed.kernels import hopper_blocks, hopper_prefill
from tokenspeed.kernels.attend import reference
from tokenspeed.kernels.hopper_planned import HopperPrefill, blocks_of

MODULES = (hopper_prefill, hopper_blocks)
EDGES = (1, 2, 63, 64, 65, 127, 128, 129, 192, 256, 257, 384)

COMPILE = """
import pathlib, subprocess, tempfile
import torch
torch.version.cuda = "13.0"  # what a torch for CUDA says: kernels are there, the device is not
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from tokenspeed.kernels.hopper_blocks import DTYPES, _layout
from tokenspeed.kernels.hopper_prefill import _prefill_kernel

dtype, heads, group = WAY
name = DTYPES[getattr(torch, dtype)]

def described(rows):
    short = {"bfloat16": "bf16", "float16": "fp16"}[name]
    return f"tensordesc<{short}[1, 1, {rows}, 128],{_layout(rows, name)!r}>"

signature = {
    "q": described(128), "k": described(128), "v": described(128), "out": described(64),
    "blocks": "*i32", "num_blocks": "i32", "scale": "fp32",
    "q_head": "i32", "k_head": "i32", "v_head": "i32",
    "HEADS": "constexpr", "GROUP": "constexpr", "STAGES": "constexpr",
}
values = {(10,): heads, (11,): group, (12,): 2}
source = GluonASTSource(_prefill_kernel, signature, values, {(4,): [["tt.divisibility", 16]]})
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
assert "wgmma.mma_async" in made.asm["ptx"]
print(made.metadata.shared, made.metadata.num_warps)
with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(made.asm["cubin"])
    file.flush()
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    print(subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout)
"""


@pytest.mark.parametrize(("dtype", "heads", "group"), [("bfloat16", 32, 4), ("float16", 6, 1)])
def test_it_compiles_for_hopper(dtype: str, heads: int, group: int) -> None:
    pytest.importorskip("triton")
    code = COMPILE.replace("WAY", repr((dtype, heads, group)))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    numbers, usage = done.stdout.split("\n", 1)
    shared, warps = map(int, numbers.split())
    assert shared <= 227 << 10 and warps == 12
    assert "STACK:0 " in usage and "LOCAL:0 " in usage, f"registers in memory: {usage}"


def test_what_is_not_served() -> None:
    starts = torch.tensor([0, 2], dtype=torch.int32)
    options = {"causal": True, "sm_scale": 0.1, "q_data_type": torch.bfloat16}
    prefill = HopperPrefill(torch.device("cpu"))
    for heads, changes in (
        ((4, 2, 64), {}),
        ((4, 3, 128), {}),
        ((4, 2, 128), {"causal": False}),
        ((4, 2, 128), {"q_data_type": torch.float32}),
    ):
        with pytest.raises(AssertionError):
            prefill.plan(starts, starts, *heads, **{**options, **changes})  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        prefill.plan(starts, starts + 1, 4, 2, 128, **options)  # type: ignore[arg-type]
    q = torch.zeros(2, 4, 128, dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match="before plan"):
        prefill.run(q, q, q, out=q)
    prefill.plan(starts, starts, 4, 4, 128, **options)  # type: ignore[arg-type]
    with pytest.raises(AssertionError, match="1 tokens, 2 planned"):
        prefill.run(q[:1], q[:1], q[:1], out=q[:1])
    wide = torch.zeros(2, 4, 264, dtype=torch.bfloat16)
    uneven = torch.zeros(2, 4 * 128 + 1, dtype=torch.bfloat16)[:, :-1].unflatten(1, (4, 128))
    for x in (wide[..., 1:129], wide[..., :256:2], uneven):
        with pytest.raises(AssertionError, match="TMA does not read"):
            hopper_blocks.described(x, 128)


LENGTHS = st.lists(st.one_of(st.integers(0, 400), st.sampled_from(EDGES)), min_size=1, max_size=4)


def run_modelled(
    lengths: Sequence[int], heads: tuple[int, int], num_programs: int, seed: int
) -> None:
    """Whatever goes first, it ends and is right: no deadlock, no buffer that is filled too early or
    read too late, each row of each head once, nothing of other sequences or from behind them.
    """
    num_heads, num_kv_heads = heads
    total, width = sum(lengths), (num_heads + 2 * num_kv_heads) * 128
    generator = torch.Generator().manual_seed(seed)
    merged = torch.full((total + 130, width), torch.nan, dtype=torch.bfloat16)
    merged[:total] = torch.randn(total, width, generator=generator)
    parts = merged[:total].split([num_heads * 128, num_kv_heads * 128, num_kv_heads * 128], dim=1)
    q, k, v = (part.unflatten(1, (-1, 128)) for part in parts)
    out = torch.full((total + 130, num_heads, 128), 7.0, dtype=torch.bfloat16)
    starts = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    prefill = HopperPrefill(torch.device("cpu"))
    prefill.plan(starts, starts, *heads, 128, causal=True, sm_scale=0.2, q_data_type=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        kernel = Kernel(patch, MODULES, "_prefill", seed)
        patch.setattr(hopper_prefill, "_prefill_kernel", kernel)
        patch.setattr(hopper_blocks, "_layout", lambda rows, dtype: None)
        patch.setattr(hopper_prefill, "num_multiprocessors", lambda device: num_programs)
        prefill.run(q, k, v, out=out[:total])
    assert (out[total:] == 7).all()
    rows = zip(*(each.split(lengths) for each in (q, k, v, out[:total])), strict=True)
    for own_q, own_k, own_v, got in rows:
        if len(got):
            want = reference(own_q, own_k, own_v, 0.2)
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)


@given(
    LENGTHS,
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    st.integers(1, 4),
    st.integers(0, 1 << 32),
)
@settings(max_examples=20, deadline=None)
def test_the_kernel_in_a_model_of_hopper(
    lengths: list[int], heads: tuple[int, int], num_programs: int, seed: int
) -> None:
    run_modelled(lengths, heads, num_programs, seed)


@pytest.mark.parametrize(
    ("lengths", "heads", "num_programs"),
    [((5, 6, 7), 1, 1), ((384,), 2, 3), ((384,), 1, 3)],
    ids=["short items", "the last begins like the first", "one item"],
)
def test_the_ends_of_a_programs_work(
    lengths: tuple[int, ...], heads: int, num_programs: int
) -> None:
    for seed in range(40):
        run_modelled(lengths, (heads, 1), num_programs, seed)


def shares(lengths: Sequence[int], heads: int, grid: int) -> list[list[Item]]:
    """Each program's items, as the kernel finds them."""
    table = torch.from_numpy(blocks_of(np.array([0, *itertools.accumulate(lengths)], np.int32)))
    grid, found = min(grid, len(table) * heads), []
    for index in range(grid):
        with pytest.MonkeyPatch.context() as patch:
            kernel = Kernel(patch, MODULES, "_prefill", 0)
            kernel.become(index, grid)
            count = hopper_blocks.num_items_of(len(table), heads)
            items = [hopper_blocks.item_of(Place(table), i, heads) for i in range(count)]
        found.append([Item(*each) for each in items])
    return found


class Item(NamedTuple):
    first: int
    length: int
    end: int
    head: int

    @property
    def cost(self) -> float:
        """In blocks of keys; what comes once an item is a third of one, about."""
        return self.first // 128 + 1.35


@given(LENGTHS, st.integers(1, 5), st.integers(1, 40))
@settings(deadline=None)
def test_each_block_of_each_head_once(lengths: list[int], heads: int, grid: int) -> None:
    found = shares(lengths, heads, grid)
    assert all(found), "a program without an item would wait for one"
    assert all(sorted(mine, key=lambda item: -item.first) == mine for mine in found)
    ends = list(itertools.accumulate(lengths))
    want = [
        Item(first, length, end, head)
        for length, end in zip(lengths, ends, strict=True)
        for first in range(0, length, 128)
        for head in range(heads)
    ]
    assert sorted(itertools.chain(*found)) == sorted(want)


def greedy(costs: Sequence[float], grid: int) -> float:
    """The greatest load where each item, the longest first, goes to whoever has least."""
    loads = [0.0] * grid
    for cost in sorted(costs, reverse=True):
        heapq.heapreplace(loads, loads[0] + cost)
    return max(loads)


@pytest.mark.parametrize("heads", [16, 32, 40])
@pytest.mark.parametrize(
    "lengths",
    [[8192], [1024] * 8, [4096] * 2, [2048] * 4, [2048], [1, 2, 63, 64, 65, 128, 129, 1000, 8192]],
    ids=str,
)
def test_programs_have_as_much_to_do(lengths: list[int], heads: int) -> None:
    """Nearly as evenly as if each item were given to whoever has least to do, which takes the host
    a hundred times as long.
    """
    loads = [sum(item.cost for item in mine) for mine in shares(lengths, heads, 132)]
    costs = [item.cost for mine in shares(lengths, heads, 1) for item in mine]
    assert max(loads) <= 1.05 * greedy(costs, 132)
