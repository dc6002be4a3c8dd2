"""Traces of the engine's steps: what is in them, when they end, what keeps them from being made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from engine_tiny import Outcome, request, tiny_engine

from tokenspeed.engine import profiler
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.messages import MAX_PROFILE_STEPS
from tokenspeed.engine.profiler import Profiler, ProfileRefused


@pytest.fixture(scope="module")
def engine(tiny_model: str) -> Engine:
    return tiny_engine(tiny_model, level=0)


def profiler_of(engine: Engine, folder: Path | None) -> Profiler:
    return Profiler(None if folder is None else str(folder), lambda: engine.stats.steps)


def run(engine: Engine, profiling: Profiler) -> list[int]:
    """A request of some twelve steps, as the engine's process has them done."""
    outcome = Outcome()
    engine.add(request("a", [1, 2, 3], ignore_eos=True))
    while engine.has_work:
        with profiling.step():
            for delta in engine.step():
                outcome.push(delta)
    return outcome.token_ids


def steps_of(path: str) -> list[Any]:
    events = json.loads(Path(path).read_text())["traceEvents"]
    assert any(event["name"].startswith("aten::") for event in events)
    return [each for each in events if each["name"] == "engine.step" and each["ph"] == "X"]


def test_the_steps_that_were_asked_for_are_recorded(engine: Engine, tmp_path: Path) -> None:
    """Of two recordings behind each other, and nothing is different for the request."""
    profiling = profiler_of(engine, tmp_path / "new" / "folder")
    expected, paths = run(engine, profiling), []
    assert not tmp_path.joinpath("new").exists()
    for num_steps in (2, 5):
        told = profiling.start(num_steps)
        assert told.num_steps == 0 and not Path(told.path).exists()
        with pytest.raises(ProfileRefused, match="already"):
            profiling.start(1)
        assert run(engine, profiling) == expected
        assert len(steps_of(told.path)) == num_steps, "written without being told to"
        assert profiling.stop() == profiling.stop() == type(told)(told.path, num_steps)
        paths.append(Path(told.path))
    assert sorted((tmp_path / "new" / "folder").iterdir()) == sorted(paths)


def test_a_recording_ends_when_it_is_told_to(engine: Engine, tmp_path: Path) -> None:
    profiling = profiler_of(engine, tmp_path)
    with pytest.raises(ProfileRefused, match="no profile has been recorded"):
        profiling.stop()
    profiling.start(MAX_PROFILE_STEPS)
    run(engine, profiling)
    told = profiling.stop()
    assert told.num_steps == len(steps_of(told.path)) > 10


def test_steps_and_memory_are_bounded(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiler, "MAX_PROFILE_STEPS", 3)
    profiling = profiler_of(engine, tmp_path)
    profiling.start(1 << 40)
    run(engine, profiling)
    assert profiling.stop().num_steps == 3
    monkeypatch.setattr(profiler, "MAX_BYTES", -(1 << 40))
    profiling.start(3)
    run(engine, profiling)
    assert profiling.stop().num_steps == 1
    monkeypatch.setattr(profiler, "MAX_TRACES", 2)
    with pytest.raises(ProfileRefused, match="holds 2 traces: remove some"):
        profiling.start(1)


def test_what_keeps_a_trace_from_being_made_is_said(engine: Engine, tmp_path: Path) -> None:
    """And ends no request."""
    with pytest.raises(ProfileRefused, match="--profile-dir"):
        profiler_of(engine, None).start(1)
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileRefused, match="--profile-dir cannot be used"):
        profiler_of(engine, tmp_path / "file").start(1)
    profiling = profiler_of(engine, tmp_path / "folder")
    expected = run(engine, profiling)
    profiling.start(2)
    (tmp_path / "folder").rmdir()
    assert run(engine, profiling) == expected
    with pytest.raises(ProfileRefused, match="could not be written: FileNotFoundError"):
        profiling.stop()
    profiling.start(2)
    assert run(engine, profiling) == expected
    assert profiling.stop().num_steps == 2
