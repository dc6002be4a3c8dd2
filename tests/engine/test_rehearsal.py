"""A rehearsed start: what it leaves is found by the next one, and goes into the archive."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_tiny import tiny_config, tiny_engine

from tokenspeed import ledger
from tokenspeed.batch import Batch
from tokenspeed.compile.archive import read_archive
from tokenspeed.compile.cache import CompileCache
from tokenspeed.config import Config
from tokenspeed.engine import linear_tables, rehearsal, rehearsal_process, warmup
from tokenspeed.engine.model import ServedModel
from tokenspeed.engine.rehearsal import Rehearsal, RehearsalFailed, Rehearsed, rehearse
from tokenspeed.kernels import linear_cpu_choices


@pytest.fixture
def config(tiny_model: str, tiny_cache: Path, tmp_path: Path) -> Config:
    """Settings with a cache of their own, in which the tiny model is."""
    root = shutil.copytree(tiny_cache, tmp_path / "cache")
    return tiny_config(tiny_model, level=1, cache_dir=str(root))


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How often linear kernels were measured, if any model is worth it for a moment."""
    monkeypatch.setattr(linear_tables, "_WORTH_BYTES", 0)
    monkeypatch.setattr(linear_tables, "_BUDGET_S", 0.01)
    monkeypatch.setattr(ledger, "_counts", {})
    yield lambda: sum(each.count for each in ledger.totals() if each.kind == "tuning")
    linear_cpu_choices.uninstall()


def table_of(config: Config) -> Path:
    (folder,) = CompileCache(Path(str(config.compile.cache_dir))).entry_folders()
    return folder / "tuning.json"


def test_what_is_measured_no_start_measures(
    config: Config, tmp_path: Path, measured: Callable[[], int]
) -> None:
    assert not table_of(config).exists()
    phases: list[str] = []
    rehearsal_process.run(config, lambda phase, detail: phases.append(phase))
    assert measured() == 1 and phases == ["tune"]
    kept = table_of(config).read_bytes()
    engine = tiny_engine(config.model.model, level=1, cache_dir=config.compile.cache_dir)
    assert "compile cache hit" in engine.ready.summary
    assert measured() == 1 and table_of(config).read_bytes() == kept
    assert warmup.warmup([config], str(tmp_path / "a.tar")) == 0
    assert kept in read_archive(tmp_path / "a.tar", None).values()


def test_a_rehearsal_is_a_process(config: Config) -> None:
    said: list[str] = []
    done = rehearse(Rehearsal(config, torch.get_num_threads()), said.append)
    assert isinstance(done, Rehearsed) and 0 < done.seconds < 600
    assert done.jit == () and not table_of(config).exists(), "so few weights are not worth it"
    assert said == []


def test_one_that_fails_says_why(tmp_path: Path, tiny_model: str) -> None:
    config = tiny_config(tiny_model, level=1, cache_dir=str(tmp_path / "empty"))
    done = rehearse(Rehearsal(config, torch.get_num_threads()), lambda detail: None)
    assert isinstance(done, RehearsalFailed) and "no entry in" in done.message


def test_one_that_dies_is_told(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "MODULE", "tokenspeed.no_such_module")
    done = rehearse(Rehearsal(config, 1), lambda detail: None)
    assert done == RehearsalFailed("its process ended with exit code 1")


def test_warmup_rehearses_where_it_is_asked_to(
    config: Config, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    asked: list[Any] = []

    def fake(job: Rehearsal, progress: Callable[[str], None]) -> Rehearsed:
        asked.append(job)
        progress("a start, rehearsed: tune")
        return Rehearsed(2.0, (ledger.JitCount("tuning", "startup", 1, 1.5),))

    monkeypatch.setattr(warmup, "rehearse", fake)
    assert warmup.warmup([config]) == 0 and asked == []
    assert warmup.warmup([config], autotune=True) == 0
    assert asked == [Rehearsal(config, torch.get_num_threads())]
    assert "a start rehearsed in 2.0 s: 1 tuning" in log()
    narrow = replace(config, model=replace(config.model, dtype="bfloat16"))
    monkeypatch.setattr(warmup, "_compiled", lambda *arguments: None)
    warmup._prepared(CompileCache(Path(str(config.compile.cache_dir))), narrow, autotune=True)
    assert len(asked) == 1, "nothing is chosen in bfloat16"


def test_on_cuda_autotune_rehearses_the_level_that_measures(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = warmup.wanted(config)
    levels: list[int | None] = []
    measures = (ledger.JitCount("tuning", "startup", 1, 1.5),)

    def fake(job: Rehearsal, progress: object) -> Rehearsed:
        levels.append(job.config.compile.level)
        return Rehearsed(1.0, measures if levels.count(3) == 1 else ())

    monkeypatch.setattr(warmup, "rehearse", fake)
    monkeypatch.setattr(warmup, "wanted", lambda config: found)
    monkeypatch.setattr(ServedModel, "device", torch.device("cuda"))
    assert [warmup.warmup([config]), warmup.warmup([config], autotune=True)] == [0, 0]
    (level,) = {config.compile.level}
    assert levels == [level, *(3, 3, level)], "once more for the kernels that were chosen"
    assert warmup.warmup([config], autotune=True) == 0
    assert levels[4:] == [3, level], "there is a table"


def test_a_rehearsal_that_fails_is_a_warmup_that_does(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: Callable[[], str]
) -> None:
    monkeypatch.setattr(warmup, "rehearse", lambda *job: RehearsalFailed("CUDA out of memory"))
    assert warmup.warmup([config], str(tmp_path / "a.tar"), autotune=True) == 1
    assert "a start with made-up weights fails: CUDA out of memory; `tokenspeed cache" in log()
    assert not (tmp_path / "a.tar").exists()


def test_requests_are_served_for_nobody(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ledger, "_counts", {})
    engine = tiny_engine(tiny_model, level=0, jit_after_ready="error")
    launch, lengths = engine._worker.launch, []

    def heard(batch: Batch) -> Any:
        lengths.append(sum(row.num_tokens for row in batch.rows))
        with ledger.compiling("triton", "kernel", "nobody waits"):
            return launch(batch)

    monkeypatch.setattr(engine._worker, "launch", heard)
    with ledger.rehearsing():
        rehearsal_process.serve(engine)
    engine.check()
    assert {1, 24, 100} <= set(lengths), "alone"
    assert max(lengths) > 252, "together, or the longest there is room for"
    (count,) = ledger.totals()
    assert count.phase == "startup" and count.count == len(lengths)
    assert "after readiness" not in caplog.text
    with pytest.raises(RuntimeError, match=r"a request fails: .*JitAfterReady"):
        rehearsal_process.serve(engine)


def test_a_start_on_cuda_is_rehearsed_whole(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With weights that are made up, CUDA graphs, and no compiler."""
    built: list[Config] = []
    engine = object()

    def build(made: Config, progress: object) -> object:
        built.append(made)
        return engine

    served_by: list[object] = []
    monkeypatch.setattr(rehearsal_process, "build_engine", build)
    monkeypatch.setattr(rehearsal_process, "serve", served_by.append)
    monkeypatch.setattr(ServedModel, "device", torch.device("cuda"))
    rehearsal_process.run(config, lambda phase, detail: None)
    (made,) = built
    assert served_by == [engine]
    assert made.model.load_format == "dummy" and made.model.model == config.model.model
    assert (made.compile.level, made.compile.require_cache) == (None, True)
