"""The table of linear kernels over starts: measured once, kept, read, replaced if it is none."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_tiny import request, run, tiny_config, tiny_engine
from torch import Tensor
from torch.nn.functional import linear as torch_linear

from tokenspeed.compile.entry import Contents, Entry, Manifest
from tokenspeed.engine import linear_tables, program
from tokenspeed.engine.linear_tables import LinearKernels
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.kernels import linear_cpu_choices
from tokenspeed.kernels.linear import linear
from tokenspeed.kernels.linear_cpu import Linear
from tokenspeed.kernels.native import Native

SHAPE = (96, 48)


class Rows:
    """A kernel that counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        self.num_calls += 1
        return torch_linear(x, w, bias)


class Starts:
    """Starts of a model of one shape, at one entry of a cache."""

    def __init__(self, folder: Path) -> None:
        self.entry = Entry(folder, Manifest(1, {}, Contents({}, None), {}), {})
        self.table = folder / "tuning.json"
        self.weights = [torch.randn(SHAPE) for _ in range(3)]
        self.reports: list[tuple[str, str]] = []

    def start(self, rows: Linear | None, *, are_real: bool = True, **weights: Any) -> None:
        linear_cpu_choices.uninstall()
        native = None if rows is None else cast(Native, SimpleNamespace(rows=rows))
        kernels = LinearKernels(native, self.entry)
        parameters = weights.get("parameters", self.weights)
        kernels.install(parameters, are_real, lambda *report: self.reports.append(report))

    @property
    def num_measured(self) -> int:
        return len(self.reports)


@pytest.fixture(autouse=True)
def without_choices() -> Iterator[None]:
    yield
    linear_cpu_choices.uninstall()


@pytest.fixture
def starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Starts:
    """Any model is worth measuring, for a moment."""
    monkeypatch.setattr(linear_tables, "_WORTH_BYTES", 0)
    monkeypatch.setattr(linear_tables, "_BUDGET_S", 0.01)
    tmp_path.chmod(0o700)
    return Starts(tmp_path)


def shapes_in(table: Path) -> set[tuple[int, int]]:
    return {(each["num_rows"], each["size"]) for each in json.loads(table.read_text())["entries"]}


def test_a_table_is_measured_once_and_kept(starts: Starts, log: Callable[[], str]) -> None:
    starts.start(Rows())
    assert starts.reports == [("tune", "linear kernels, 1 shapes")]
    assert "linear kernels: measured in 0.0 s, kept with the compile cache" in log()
    kept = starts.table.read_bytes()
    assert shapes_in(starts.table) == {SHAPE}
    rows = Rows()
    starts.start(rows)
    assert starts.num_measured == 1 and rows.num_calls == 0
    assert starts.table.read_bytes() == kept


def test_the_kept_table_chooses(starts: Starts) -> None:
    starts.start(Rows())
    table = json.loads(starts.table.read_text())
    table["entries"][0]["choices"] = [{"max_tokens": 4, "kernel": "rows"}]
    starts.table.write_text(json.dumps(table))
    rows = Rows()
    starts.start(rows)
    for num_tokens, calls in [(1, 1), (4, 2), (5, 2)]:
        linear(torch.randn(num_tokens, SHAPE[1]), starts.weights[0])
        assert rows.num_calls == calls
    assert starts.num_measured == 1


def changed(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(path: Path) -> None:
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return apply


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "other threads": (changed(lambda t: t["facts"].update(threads=99)), "with threads 99, here"),
    "other ISA": (changed(lambda t: t["facts"].update(capability="SVE")), "capability 'SVE'"),
    "other torch": (changed(lambda t: t["facts"].update(torch="1.0")), "with torch '1.0', here"),
    "no facts": (changed(lambda t: t["facts"].clear()), "with capability None, here"),
    "other shapes": (changed(lambda t: t["entries"].clear()), "lacks a weight of [96, 48]"),
    "unknown kernel": (
        changed(lambda t: t["entries"][0].update(choices=[{"max_tokens": 4, "kernel": "x"}])),
        "unknown kernels ['x']",
    ),
    "cut short": (lambda path: path.write_bytes(path.read_bytes()[:-9]), "is ignored"),
    "empty": (lambda path: path.write_bytes(b""), "is ignored"),
    "of others": (lambda path: path.chmod(0o666), "measured in"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_is_measured_again(
    starts: Starts, log: Callable[[], str], name: str
) -> None:
    starts.start(Rows())
    kept = starts.table.read_text()
    change, reason = UNFIT[name]
    change(starts.table)
    for _ in range(2):
        starts.start(Rows())
    assert starts.num_measured == 2
    assert reason in log()
    facts = [json.loads(text)["facts"] for text in (kept, starts.table.read_text())]
    assert facts[0] == facts[1] and shapes_in(starts.table) == {SHAPE}


def test_a_kernel_that_can_be_had_later_is_measured_then(starts: Starts) -> None:
    starts.start(None)
    starts.start(None)
    assert starts.num_measured == 1
    starts.start(Rows())
    assert starts.num_measured == 2


def test_where_measuring_is_not_worth_it_a_table_is_assumed(
    starts: Starts,
    log: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, logger="tokenspeed")

    def assert_assumed(reason: str, **options: Any) -> None:
        rows = Rows()
        starts.start(rows, **options)
        linear(torch.randn(8, SHAPE[1]), starts.weights[0])
        assert rows.num_calls == 1
        assert reason in log()

    assert_assumed("the default table is used: the weights are made up", are_real=False)
    monkeypatch.setattr(linear_tables, "_WORTH_BYTES", 1 << 20)
    assert_assumed("the default table is used: the weights are small (54 KiB)")
    monkeypatch.setattr(linear_tables, "_WORTH_BYTES", 0)
    monkeypatch.setattr(linear_tables.Entry, "can_keep_tuning", False)
    assert_assumed("cannot be written")
    assert starts.num_measured == 0 and not starts.table.exists()


def test_a_model_without_such_weights_needs_no_table(starts: Starts) -> None:
    starts.start(Rows(), parameters=[torch.randn(SHAPE).bfloat16(), torch.randn(8)])
    assert starts.num_measured == 0 and not starts.table.exists()


def test_a_folder_that_goes_away_costs_the_table_only(
    starts: Starts, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_tables.Entry, "write_tuning", lambda self, data: False)
    starts.start(Rows())
    assert "measured in 0.0 s, not kept" in log()


def choices_of(folder: str, cache: Path, **options: Any) -> dict[torch.Size, Any]:
    """What `linear` chooses from after a start, and that the engine then runs."""
    linear_cpu_choices.uninstall()
    engine = tiny_engine(folder, cache_dir=str(cache), **options)
    outcome = run(engine, [request("a", [1, 2, 3])])["a"]
    assert outcome.finish_reason == "stop" or len(outcome.token_ids) == 12
    return dict(linear_cpu_choices._choices)


def test_an_engine_from_the_cache_chooses_for_its_layers(tiny_model: str, tiny_cache: Path) -> None:
    assert set(choices_of(tiny_model, tiny_cache)) >= {torch.Size(s) for s in [(64, 32), (96, 32)]}


def test_without_a_compiler_an_engine_runs_as_well(
    tiny_model: str, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "obtain_native", lambda config: None)
    choices = choices_of(tiny_model, tiny_cache)
    assert {kernel for each in choices.values() for _, kernel in each} == {torch_linear}


def test_eager_pieces_choose_nothing(tiny_model: str, tiny_cache: Path) -> None:
    assert choices_of(tiny_model, tiny_cache, level=0) == {}


def test_plain_is_another_program_and_builds_nothing(tiny_model: str, tmp_path: Path) -> None:
    config = tiny_config(tiny_model, weight_layout="plain")
    assert target_of(resolve_served(config), config).disabled_passes == ("weight_layout",)
    assert choices_of(tiny_model, tmp_path / "none", weight_layout="plain") == {}
    assert not (tmp_path / "none").exists()


def test_a_pass_that_is_disabled_leaves_nothing_to_choose(tiny_model: str, tmp_path: Path) -> None:
    config = tiny_config(tiny_model, disable_pass=("weight_layout",))
    target = target_of(resolve_served(config), config)
    assert not program.chooses_linear(target)
    config = tiny_config(tiny_model, dtype="bfloat16")
    assert not program.chooses_linear(target_of(resolve_served(config), config))
    config = tiny_config(tiny_model)
    assert program.chooses_linear(target_of(resolve_served(config), config))
