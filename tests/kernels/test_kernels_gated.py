"""The gated product on Hopper: here it is only compiled, for that GPU, and its tiles are checked.
Its results are compared in tests/gpu.
"""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tokenspeed.kernels import gated
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Site, Tile
from tokenspeed.kernels.linear_tuning import candidates

COMPILE = """
import torch
torch.version.cuda = "13.0"  # what a torch for CUDA says: kernels are there, the device is not
from triton.backends.compiler import GPUTarget
from triton.compiler import compile
from triton.experimental.gluon._runtime import GluonASTSource
from tokenspeed.kernels import gated

def described(rows, columns):
    return f"tensordesc<bf16[{rows}, {columns}],{gated._layout(rows, columns, 'bfloat16')!r}>"

tokens, rows, size, stages = TILE
kernel = gated._gated_kernel
signature = {
    "x": described(tokens, size),
    "w": described(rows, size),
    "out": described(tokens // 2, rows),
    "STAGES": "constexpr",
    "GROUP": "constexpr",
}
source = GluonASTSource(kernel, signature, {(3,): stages, (4,): 2048 // tokens}, {})
made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4, "maxnreg": 168})
assert "wgmma.mma_async" in made.asm["ptx"]
print(made.metadata.shared, made.metadata.num_warps)
"""
TILES = list(candidates(Site("gate_up", 24576, 4096, "bfloat16"), 4096))


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.tokens}x{tile.rows}")
def test_each_tile_compiles_for_hopper(tile: Tile) -> None:
    pytest.importorskip("triton")
    shape = f"({tile.tokens}, {tile.rows}, {tile.size}, {tile.stages})"
    code = COMPILE.replace("TILE", shape)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shared, warps = map(int, done.stdout.split())
    assert shared <= 227 << 10 and warps == 12


def test_tiles_that_no_multiprocessor_holds() -> None:
    tile = Tile("gated", rows=128, warps=8, size=64, tokens=128, stages=4)
    assert tile.problem() is None
    for changes in ({"tokens": 64}, {"rows": 8}, {"size": 128}, {"warps": 4}):
        assert "a gated tile" in str(Tile(**{**_fields(tile), **changes}).problem())
    assert "registers" in str(Tile(**{**_fields(tile), "tokens": 256}).problem())
    assert "shared memory" in str(Tile(**{**_fields(tile), "stages": 5}).problem())


def _fields(tile: Tile) -> dict[str, object]:
    return {name: getattr(tile, name) for name in tile.__struct_fields__}


def test_only_hopper_is_served() -> None:
    call = LinearCall(torch.ones(256, 64).bfloat16(), torch.ones(128, 64).bfloat16(), gate=True)
    assert not gated.serves(call)
