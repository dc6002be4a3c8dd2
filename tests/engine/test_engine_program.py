"""Where programs come from: cache, compiler process, eager pieces. Nothing of it stops a start."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_tiny import Outcome, request, run, tiny_config, tiny_engine

from tokenspeed.compile.entry import Damaged, Entry, Unloadable
from tokenspeed.config import COMPILE_TIME
from tokenspeed.engine import build, program
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.compile_job import Compiled, CompileFailed, CompileJob
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.program import obtain_program
from tokenspeed.options import ConfigError

EAGER, HIT = "level 0,", "level 1 (compile cache hit),"


def tokens(engine: Engine) -> dict[str, list[int]]:
    prompts = {"a": [1, 2, 3, 4, 5], "b": [9, 8, 7], "c": list(range(20, 60))}
    outcomes: dict[str, Outcome] = run(engine, [request(k, v) for k, v in prompts.items()])
    return {name: outcome.token_ids for name, outcome in outcomes.items()}


@pytest.fixture(scope="module")
def eager_tokens(tiny_model: str) -> dict[str, list[int]]:
    return tokens(tiny_engine(tiny_model, level=0))


@pytest.fixture
def cache(tiny_cache: Path, tmp_path: Path) -> Path:
    """A cache with the tiny model in it, to be harmed."""
    return Path(shutil.copytree(tiny_cache, tmp_path / "cache"))


@pytest.mark.parametrize("level", [None, 1])
def test_what_the_cache_has_is_taken(
    tiny_model: str, tiny_cache: Path, level: int | None, eager_tokens: dict[str, list[int]]
) -> None:
    engine = tiny_engine(tiny_model, level=level, cache_dir=str(tiny_cache))
    assert HIT in engine.ready.summary
    assert tokens(engine) == eager_tokens


def test_without_a_level_a_cpu_does_not_compile(
    tiny_model: str, tmp_path: Path, log: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "CompileChild", None)
    engine = tiny_engine(tiny_model, cache_dir=str(tmp_path / "none"))
    assert EAGER in engine.ready.summary
    assert "not compiled yet, so pieces run eagerly; `tokenspeed warmup" in log()
    assert f" compiles them for good ({COMPILE_TIME}): no entry in " in log()
    assert not (tmp_path / "none").exists()


def test_strict_passes_ask_for_a_compile(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is compiled, no pass is looked at."""
    child = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(program, "CompileChild", lambda *arguments, **options: child)
    model = resolve_served(tiny_config(tiny_model, cache_dir=str(tmp_path), strict_passes=True))
    with obtain_program(model, model.settings) as pending:
        assert pending._compiled is not None and pending._compiled._child is child


def test_a_start_that_finds_all_sweeps_too(tiny_model: str, cache: Path) -> None:
    (left := cache / "v1" / ".load-killed").mkdir()
    os.utime(left, (0, 0))
    model = resolve_served(tiny_config(tiny_model, cache_dir=str(cache), level=1))
    with obtain_program(model, model.settings):
        assert not left.exists()


def test_a_miss_says_what_differs(
    tiny_model: str, tiny_cache: Path, log: Callable[[], str]
) -> None:
    tiny_engine(tiny_model, dtype="bfloat16", cache_dir=str(tiny_cache))
    assert "compile.dtype 'bfloat16' (there 'float32')" in log()


def test_level_0_does_not_look(tiny_model: str, tiny_cache: Path) -> None:
    assert EAGER in tiny_engine(tiny_model, level=0, cache_dir=str(tiny_cache)).ready.summary


def test_another_place_port_or_pool_hits(tiny_model: str, tiny_cache: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(tiny_model, tmp_path / "moved")
    options = {"seed": 5, "port": 1, "max_num_seqs": 3, "max_model_len": 99, "log_level": "debug"}
    config = tiny_config(str(moved), cache_dir=str(tiny_cache), **options)
    with obtain_program(resolve_served(config), config) as pending:
        assert pending.result(lambda *report: None).level == HIT.rstrip(",")


@pytest.mark.parametrize("name", ["READY", "manifest.json", "plan.json", "pieces", "inductor"])
def test_a_damaged_cache_is_no_hindrance(
    tiny_model: str, cache: Path, name: str, eager_tokens: dict[str, list[int]]
) -> None:
    for path in (cache / "v1").glob(f"[!.]*/**/{name}"):
        for file in [path, *path.rglob("*")]:
            if file.is_file():
                os.truncate(file, file.stat().st_size // 2)
    engine = tiny_engine(tiny_model, cache_dir=str(cache))
    assert EAGER in engine.ready.summary
    assert tokens(engine) == eager_tokens
    assert len(list((cache / "v1").glob(".aside-*"))) == 1


def test_damage_is_named_where_a_hit_is_required(tiny_model: str, cache: Path) -> None:
    for path in (cache / "v1").glob("[!.]*/plan.json"):
        os.truncate(path, 1)
    with pytest.raises(ConfigError) as caught:
        tiny_engine(tiny_model, cache_dir=str(cache), require_cache=True)
    assert str(caught.value).startswith(
        "--require-cache: its entry was damaged and is set aside: plan.json is not what was written"
    )


class FakeChild:
    """Stands for the compiler's process: does what the test says, and notes how it was used."""

    def __init__(self, answer: Compiled | CompileFailed, work: Callable[[Path], object]) -> None:
        self.answer, self.work = answer, work
        self.jobs: list[CompileJob] = []
        self.num_closed = 0

    def __call__(self, job: CompileJob) -> FakeChild:
        self.jobs.append(job)
        return self

    def wait(self, progress: Callable[[str], None]) -> Compiled | CompileFailed:
        progress("piece 1 of 5")
        self.work(Path(self.jobs[-1].root))
        return self.answer

    def close(self) -> None:
        self.num_closed += 1


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeChild]:
    def make(
        answer: Compiled | CompileFailed = Compiled(1.0, "rope 4"),  # noqa: B008
        work: Callable[[Path], object] = lambda root: None,
    ) -> FakeChild:
        fake = FakeChild(answer, work)
        monkeypatch.setattr(program, "CompileChild", fake)
        return fake

    return make


def copy_into(tiny_cache: Path) -> Callable[[Path], object]:
    return lambda root: shutil.copytree(tiny_cache, root, dirs_exist_ok=True)


def test_a_miss_is_compiled_and_then_loaded(
    tiny_model: str, tiny_cache: Path, tmp_path: Path, child: Callable[..., FakeChild]
) -> None:
    fake = child(work=copy_into(tiny_cache))
    reports: list[tuple[str, str]] = []
    config = tiny_config(tiny_model, level=1, cache_dir=str(tmp_path / "new"))
    engine = build_engine(config, lambda *report: reports.append(report))
    assert "level 1 (compiled in 1.0 s)" in engine.ready.summary
    assert ("compile", "piece 1 of 5") in reports
    assert reports.index(("compile", "piece 1 of 5")) < reports.index(("kv", ""))
    (job,) = fake.jobs
    assert (job.root, job.num_threads) == (str(tmp_path / "new"), torch.get_num_threads())
    assert fake.num_closed == 1


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(CompileFailed("no compiler here"), "no compiler here"), (Compiled(1.0, ""), "no entry in")],
)
def test_a_failing_compiler_is_a_warning(
    tiny_model: str,
    tmp_path: Path,
    child: Callable[..., FakeChild],
    log: Callable[[], str],
    answer: Compiled | CompileFailed,
    reason: str,
) -> None:
    child(answer)
    engine = tiny_engine(tiny_model, level=1, cache_dir=str(tmp_path / "new"))
    assert EAGER in engine.ready.summary
    assert f"pieces run eagerly (-O0): compiling failed: {reason}" in log()
    strict = {"level": 1, "cache_dir": str(tmp_path / "new"), "strict_backends": True}
    with pytest.raises(ConfigError) as caught:
        tiny_engine(tiny_model, **strict)
    assert str(caught.value).startswith(f"--strict-backends: compiling failed: {reason}")


def test_a_dump_of_passes_compiles_for_this_start_only(
    tiny_model: str,
    tiny_cache: Path,
    tmp_path: Path,
    child: Callable[..., FakeChild],
    log: Callable[[], str],
) -> None:
    fake = child(work=copy_into(tiny_cache))
    options = {"cache_dir": str(tiny_cache), "dump_passes": str(tmp_path / "dump")}
    engine = tiny_engine(tiny_model, **options)
    assert "level 1 (compiled" in engine.ready.summary
    assert fake.jobs[0].root != str(tiny_cache) and (tmp_path / "dump").is_dir()
    assert "kept for this start only: --dump-passes compiles anew" in log()
    for changes in ({"level": 0}, {"require_cache": True}, {"dump_passes": "/dev/null/dump"}):
        with pytest.raises(ConfigError, match="--dump-passes"):
            tiny_engine(tiny_model, **(options | changes))


def test_no_thread_of_a_start_outlives_it(
    tiny_model: str,
    tmp_path: Path,
    child: Callable[..., FakeChild],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would go on to import, and to log, beside the engine."""
    monkeypatch.setattr(program, "import_inductor", lambda: time.sleep(2.0))
    child(CompileFailed("no compiler here"))
    tiny_engine(tiny_model, level=1, cache_dir=str(tmp_path / "new"))
    assert not [each for each in threading.enumerate() if each.name.startswith("load-program")]


def test_a_cache_that_cannot_be_written_is_replaced_for_this_start(
    tiny_model: str,
    tiny_cache: Path,
    tmp_path: Path,
    child: Callable[..., FakeChild],
    log: Callable[[], str],
) -> None:
    (tmp_path / "file").write_text("")
    fake = child(work=copy_into(tiny_cache))
    engine = tiny_engine(tiny_model, level=1, cache_dir=str(tmp_path / "file" / "cache"))
    assert "level 1 (compiled" in engine.ready.summary
    assert "kept for this start only: " in log() and "Not a directory" in log()
    assert not Path(fake.jobs[0].root).exists()


def test_a_cache_that_others_may_write_is_replaced_for_this_start(
    tiny_model: str, tiny_cache: Path, cache: Path, child: Callable[..., FakeChild]
) -> None:
    next((cache / "v1").glob("[!.]*/plan.json")).chmod(0o666)
    fake = child(work=copy_into(tiny_cache))
    engine = tiny_engine(tiny_model, level=1, cache_dir=str(cache))
    assert "level 1 (compiled" in engine.ready.summary
    assert fake.jobs[0].root != str(cache)
    assert EAGER in tiny_engine(tiny_model, cache_dir=str(cache)).ready.summary


@pytest.mark.parametrize("level", [None, 1])
def test_pieces_that_do_not_load_are_compiled_again_or_run_eagerly(
    tiny_model: str,
    tiny_cache: Path,
    cache: Path,
    level: int | None,
    child: Callable[..., FakeChild],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load, first = program.load_program, []

    def load_once_wrongly(entry: Any) -> Any:
        if not first:
            first.append(entry)
            raise Damaged("made for another torch")
        return load(entry)

    monkeypatch.setattr(program, "load_program", load_once_wrongly)
    fake = child(work=copy_into(tiny_cache))
    engine = tiny_engine(tiny_model, level=level, cache_dir=str(cache))
    assert ("level 1 (compiled" if level else EAGER) in engine.ready.summary
    assert len(fake.jobs) == (1 if level else 0)
    assert len(list((cache / "v1").glob(".aside-*"))) == 1


def test_an_entry_that_this_machine_cannot_load_stays(
    tiny_model: str,
    cache: Path,
    child: Callable[..., FakeChild],
    log: Callable[[], str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(entry: Entry) -> None:
        raise Unloadable("its pieces cannot be loaded: no space left")

    monkeypatch.setattr(program, "load_program", fail)
    fake = child()
    engine = tiny_engine(tiny_model, level=1, cache_dir=str(cache))
    assert EAGER in engine.ready.summary and not fake.jobs
    assert "pieces run eagerly (-O0): its pieces cannot be loaded: no space left" in log()
    with pytest.raises(ConfigError, match=r"^--strict-backends: its pieces cannot be loaded"):
        tiny_engine(tiny_model, level=1, cache_dir=str(cache), strict_backends=True)
    with pytest.raises(ConfigError, match="there is an entry, but its pieces"):
        tiny_engine(tiny_model, require_cache=True, cache_dir=str(cache))
    assert not list((cache / "v1").glob(".aside-*"))


def test_the_child_ends_with_a_start_that_fails(
    tiny_model: str,
    tmp_path: Path,
    child: Callable[..., FakeChild],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise MemoryError

    fake = child()
    monkeypatch.setattr(build, "load_weights", fail)
    with pytest.raises(MemoryError):
        tiny_engine(tiny_model, level=1, cache_dir=str(tmp_path / "new"))
    assert fake.num_closed == 1


@pytest.mark.parametrize("level", [None, 0, 1])
def test_an_unknown_pass_is_refused(tiny_model: str, level: int | None) -> None:
    with pytest.raises(ConfigError, match=r"no such pass \(known: .*silu_mul"):
        tiny_engine(tiny_model, level=level, disable_pass=("no_such_thing",))


def test_the_engine_imports_nothing_heavy_before_it_must(tiny_model: str) -> None:
    """What stands between a process and its first message, in every start."""
    heavy = ("sympy", "torch._dynamo", "torch._inductor", "flashinfer", "transformers")
    code = (
        "import sys, tokenspeed.engine.serving;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
