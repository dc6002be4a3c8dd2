"""-O3: which linear layers are measured, when, and what becomes of the table."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import GRAPHS, Contents, Entry
from tokenspeed.compile.graph_receipt import GraphReceipt, Op, PieceReceipt, encode
from tokenspeed.engine.tile_tables import TileKernels, sites_of
from tokenspeed.kernels import linear_tiles
from tokenspeed.kernels.linear_tiles import Choice, Site, Tile, TileTable, way_for
from tokenspeed.kernels.linear_tuning import made_up_weights

MACHINE = "a GPU, torch 2"
BEST = Tile("gemv", rows=2, warps=4, size=512)
BF16 = torch.bfloat16
OLD = b"""{"machine": "a GPU, torch 2", "entries": [{"kind": "linear_add", "num_rows": 64,
    "size": 64, "dtype": "bfloat16", "choices": [{"max_tokens": 1, "tile": null}]}]}"""
"""As earlier versions kept it."""


def piece(rows: int) -> PieceReceipt:
    """A piece as the passes leave it: a norm and a product, another product and a sum."""
    inputs = {"w": f"bfloat16 [{rows}, 64]", "x": "bfloat16 [T, 64]", "n": "bfloat16 [64]"}
    ops = [Op(name, "input", value=value) for name, value in inputs.items()]
    ops.append(Op("a", "tokenspeed.norm_linear", ("x", "n", "w"), ("None", "1e-06")))
    ops.append(Op("b", "tokenspeed.linear_add", ("a", "w", "x"), value=f"bfloat16 [T, {rows}]"))
    return PieceReceipt(after=(*ops, Op("output", "output", ("b",))))


PICTURES = GraphReceipt(
    pieces={
        "one": {"0-8": piece(128), "9-32": piece(128), "33-": PieceReceipt()},
        "two": {"0-8": piece(64), "9-32": PieceReceipt(), "33-": PieceReceipt()},
        "three": {"all": PieceReceipt()},
    }
)
LAYERS = {
    Site(kind, rows, 64, "bfloat16"): last
    for rows, last in ((128, 32), (64, 8))
    for kind in ("norm_linear", "linear_add")
}
COUNTS = {32: [1, 2, 4, 8, 16, 32], 8: [1, 2, 4, 8]}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "cache")


@pytest.fixture
def entry(cache: CompileCache) -> Entry:
    def fill(folder: Path) -> Contents:
        (folder / "plan.json").write_text("{}")
        (folder / GRAPHS).parent.mkdir()
        (folder / GRAPHS).write_bytes(encode(PICTURES))
        return Contents({}, None)

    return cache.store({"format": 1}, "m", fill)


@pytest.fixture(autouse=True)
def nothing_installed() -> Iterator[None]:
    yield
    linear_tiles.uninstall()


class Measured:
    """Stands for the measurement: one tile is best everywhere."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: dict[Site, list[int]] = {}
        self.error = error

    def __call__(self, site: Site, tokens: Sequence[int]) -> TileTable:
        if self.error is not None:
            raise self.error
        assert site not in self.asked
        self.asked[site] = list(tokens)
        return TileTable("", (linear_tiles.Entry(*site, (Choice(tokens[-1], BEST),)),))


def start(entry: Entry, machine: str = MACHINE, error: Exception | None = None) -> Measured:
    measure = Measured(error)
    TileKernels(entry, machine, measure).install([], False, lambda phase, detail: None)
    return measure


def test_the_layers_are_those_that_the_passes_fused() -> None:
    assert sites_of(PICTURES) == LAYERS


def test_each_layer_is_measured_once_and_the_table_is_kept(
    entry: Entry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tokenspeed")
    site = next(iter(LAYERS))
    before = way_for(site.kind, site.num_rows, site.size, BF16, 8)
    asked = start(entry).asked
    assert asked == {key: COUNTS[last] for key, last in LAYERS.items()}
    assert "layers measured in" in caplog.text and "kept with the compile cache" in caplog.text
    assert before != way_for(site.kind, site.num_rows, site.size, BF16, 8) == BEST
    linear_tiles.uninstall()
    assert start(entry).asked == {}, "the next start reads what was kept"
    assert way_for(site.kind, site.num_rows, site.size, BF16, 8) == BEST


@pytest.mark.parametrize(
    ("machine", "data", "why"),
    [
        ("another GPU", None, f"it was measured on {MACHINE}"),
        (MACHINE, b"{", "Input data was truncated"),
        (MACHINE, b"[" * 100_000, "ignored"),
        (MACHINE, TileTable(MACHINE, ()).to_json(), "it lacks 4 of 4 layers"),
        (MACHINE, OLD, "missing required field `way`"),
    ],
    ids=["machine", "damage", "depth", "layers", "format"],
)
def test_a_table_that_does_not_fit_is_measured_anew(
    entry: Entry, machine: str, data: bytes | None, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    start(entry)
    caplog.set_level(logging.INFO, logger="tokenspeed")
    if data is not None:
        assert entry.write_tuning(data)
    assert start(entry, machine).asked
    assert why in caplog.text
    assert start(entry, machine).asked == {}


def test_a_measurement_that_fails_is_a_warning(
    entry: Entry, caplog: pytest.LogCaptureFixture
) -> None:
    start(entry, error=torch.OutOfMemoryError("CUDA out of memory.\nMore"))
    assert "the default table is used: CUDA out of memory." in caplog.text
    assert entry.read_tuning() is None and not linear_tiles._installed


def test_an_entry_without_receipts_is_not_measured(
    cache: CompileCache, caplog: pytest.LogCaptureFixture
) -> None:
    def fill(folder: Path) -> Contents:
        (folder / "plan.json").write_text("{}")
        return Contents({}, None)

    assert start(cache.store({"format": 1}, "m", fill)).asked == {}
    assert "tiles are not measured" in caplog.text


def test_weights_exceed_the_caches() -> None:
    weights = made_up_weights(Site("linear_add", 4096, 4096, "bfloat16"), torch.device("meta"))
    assert sum(weight.nbytes for weight in weights) >= 256 << 20
    assert all(weight.shape == (4096, 4096) and weight.dtype == BF16 for weight in weights)
    (first, *_) = made_up_weights(Site("linear_add", 64, 4096, "float32"), torch.device("meta"))
    assert first.dtype == torch.float32
