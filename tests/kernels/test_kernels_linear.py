"""Linear layers: kernels in Triton's interpreter, ops' schemas, and the table of tiles."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch

from tokenspeed.kernels import cublas_lt, linear_tiles
from tokenspeed.kernels.linear import (
    gate_up,
    launch,
    linear,
    linear_add,
    norm_gate_up,
    norm_linear,
    reference,
)
from tokenspeed.kernels.linear_parts import LinearCall
from tokenspeed.kernels.linear_tiles import Algorithm, Choice, Entry, Tile, TileTable, way_for

BF16 = torch.bfloat16
ALGORITHM = Algorithm("0123456789abcdef" * 8, 130100)
GEMV = Tile("gemv", rows=2, warps=4, size=1024)
SKINNY = Tile("skinny", rows=64, warps=4, size=128)
ENTRY = Entry(
    "linear_add", 48, 40, "bfloat16", (Choice(1, GEMV), Choice(4, None), Choice(8, SKINNY))
)


def test_kernels_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    cases = Path(__file__).with_name("interpreted_linear.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
def test_schemas_and_fakes(dtype: torch.dtype, num_tokens: int) -> None:
    x, norm, bias = (torch.randn(s).to(dtype) for s in ((num_tokens, 8), (8,), (12,)))
    w, residual = torch.randn(12, 8).to(dtype), torch.randn(num_tokens, 12).to(dtype)
    for op, args in (
        (norm_linear, (x, norm, w, bias, 1e-6)),
        (norm_linear, (x, norm, w, None, 1e-6)),
        (linear_add, (x, w, residual)),
        (linear_add, (x, w, residual, bias)),
        (norm_gate_up, (x, norm, w, 1e-6)),
        (gate_up, (x, w)),
        (linear, (x, w, bias)),
    ):
        torch.library.opcheck(op, args)


def test_one_reference_speaks_for_all() -> None:
    x, norm, w, residual = (torch.randn(s) for s in ((3, 8), (8,), (12, 8), (3, 12)))
    for call, want in (
        (LinearCall(x, w, norm=norm, eps=0.1), norm_linear(x, norm, w, None, 0.1)),
        (LinearCall(x, w, residual=residual), linear_add(x, w, residual)),
        (LinearCall(x, w, norm=norm, eps=0.1, gate=True), norm_gate_up(x, norm, w, 0.1)),
        (LinearCall(x, w, gate=True), gate_up(x, w)),
        (LinearCall(x, w), linear(x, w)),
    ):
        assert torch.equal(reference(call), want)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (LinearCall(torch.ones(2, 4), torch.ones(3, 5)), "op: "),
        (LinearCall(torch.ones(2, 4), torch.ones(4, 3).t()), "strides"),
        (LinearCall(torch.ones(4, 2).t(), torch.ones(3, 4)), "rows must lie dense"),
        (LinearCall(torch.ones(2, 4), torch.ones(3, 4), gate=True), "op: "),
        (LinearCall(torch.ones(2, 4), torch.ones(3, 4), norm=torch.ones(3)), "norm"),
        (LinearCall(torch.ones(2, 4), torch.ones(3, 4), residual=torch.ones(1, 3)), "residual"),
        (LinearCall(torch.ones(2, 4), torch.ones(3, 4).half()), "float16"),
    ],
)
def test_operands_that_kernels_would_misread_are_refused(call: LinearCall, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        call.check("op")


@pytest.fixture
def installed() -> Iterator[None]:
    linear_tiles.install([ENTRY])
    yield
    linear_tiles.uninstall()


def test_a_table_chooses_by_token_count(installed: None) -> None:
    chosen = [way_for("linear_add", 48, 40, BF16, n) for n in (1, 2, 4, 5, 8, 9)]
    assert chosen == [GEMV, None, None, SKINNY, SKINNY, None]


def test_the_first_table_of_a_process_stays(installed: None) -> None:
    linear_tiles.install([msgspec.structs.replace(ENTRY, choices=())])
    assert way_for("linear_add", 48, 40, BF16, 1) == GEMV


def test_shapes_that_nobody_measured() -> None:
    """One token has a kernel, if its shape is one that the kernel takes; more have the library."""
    for size in (64, 1024, 4096, 12288):
        tile = way_for("linear_add", 48, size, torch.float16, 1)
        assert tile is not None and tile.kernel == "gemv" and tile.problem() is None
        assert way_for("linear_add", 48, size, torch.float16, 2) is None
    assert way_for("norm_linear", 48, 12288, torch.float16, 1) is None


def test_the_default_table_is_one() -> None:
    table = linear_tiles.default_table()
    assert "H200" in table.machine
    sites = [entry.site for entry in table.entries]
    assert len(sites) == len(set(sites)) and sites
    for entry in table.entries:
        for choice in entry.choices:
            assert way_for(*entry.site[:3], getattr(torch, entry.dtype), choice.max_tokens) == (
                choice.way
            )


def test_a_table_through_json() -> None:
    choices = (*ENTRY.choices, Choice(1 << 16, ALGORITHM))
    table = TileTable("a machine", (msgspec.structs.replace(ENTRY, choices=choices),))
    assert TileTable.from_json(table.to_json()) == table


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"choices": (Choice(4, None), Choice(4, GEMV))}, "do not ascend"),
        ({"choices": (Choice(0, None),)}, "do not ascend"),
        ({"num_rows": 0}, "a weight of 0 x 40"),
        ({"choices": (Choice(1, Tile("gemv", 3, 4, 64)),)}, "rows is 3"),
        ({"choices": (Choice(1, Tile("gemv", 1, 64, 64)),)}, "warps is 64"),
        ({"choices": (Choice(1, Tile("skinny", 8, 4, 64)),)}, "at least 16"),
        ({"choices": (Choice(1, Tile("skinny", 16, 4, 64, splits=0)),)}, "0 splits"),
        ({"choices": (Choice(1, Tile("gemv", 1, 4, 64, repeats=1 << 20)),)}, "repeats"),
        ({"choices": (Choice(1, Algorithm("00" * 63, 1)),)}, "64 bytes"),
        ({"choices": (Choice(1, Algorithm("0g" * 64, 1)),)}, "64 bytes"),
    ],
)
def test_a_table_that_no_kernel_could_follow(changes: dict[str, object], problem: str) -> None:
    bad = TileTable("a machine", (msgspec.structs.replace(ENTRY, **changes),))
    with pytest.raises(ValueError, match=problem):
        TileTable.from_json(bad.to_json())


def test_where_kernels_change_that_are_compiled() -> None:
    """What the library does is there already."""
    ways = (GEMV, None, ALGORITHM, SKINNY, None, ALGORITHM)
    choices = tuple(Choice(1 << at, way) for at, way in enumerate(ways))
    linear_tiles.install([msgspec.structs.replace(ENTRY, num_rows=99, choices=choices)])
    try:
        before = linear_tiles.token_limits()
        way_for("linear_add", 99, 40, BF16, 1)
        assert linear_tiles.token_limits() - before <= {1, 4, 8}
        assert {1, 4, 8} <= linear_tiles.token_limits()
    finally:
        linear_tiles.uninstall()


def test_an_algorithm_of_another_library() -> None:
    """Here there is none at all: the product is torch's, and the sum is there."""
    x, w, residual = torch.randn(3, 8), torch.randn(5, 8), torch.randn(3, 5)
    got = launch(LinearCall(x, w, residual=residual), ALGORITHM)
    torch.testing.assert_close(got, residual + x @ w.t())
    assert cublas_lt.proposals(x, w) == []


def test_a_table_of_an_older_format() -> None:
    text = TileTable("a machine", (ENTRY,)).to_json().replace(b'"way"', b'"tile"')
    with pytest.raises(ValueError, match="missing required field `way`"):
        TileTable.from_json(text)


def test_a_kernel_that_is_unknown() -> None:
    text = TileTable("a machine", (ENTRY,)).to_json().replace(b"gemv", b"gemm")
    with pytest.raises(ValueError, match="gemm"):
        TileTable.from_json(text)
