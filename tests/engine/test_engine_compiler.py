"""The compiler's process: what its parent sees of it, and how it ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from engine_tiny import tiny_config, tiny_engine

from tokenspeed.compile.cache import CompileCache
from tokenspeed.config import Config
from tokenspeed.engine import compile_job, program
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.compile_job import CompileChild, CompileFailed, CompileJob, Compiling
from tokenspeed.engine.model import resolve_served
from tokenspeed.engine.program import target_of
from tokenspeed.options import ConfigError

EAGER = "level 0,"


def job(config: Config, root: Path, digest: str = "0" * 16) -> CompileJob:
    return CompileJob(config=config, root=str(root), digest=digest, num_threads=1)


def test_a_compiler_that_sees_other_facts_says_so(tiny_model: str, tmp_path: Path) -> None:
    child = CompileChild(job(tiny_config(tiny_model), tmp_path))
    try:
        done = child.wait(lambda detail: None)
    finally:
        child.close()
    assert done == CompileFailed("RuntimeError: its process sees other facts than the engine's")


def test_a_compiler_that_cannot_run_says_so(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_job, "MODULE", "tokenspeed.no_such_module")
    child = CompileChild(job(tiny_config(tiny_model), tmp_path))
    assert child.wait(lambda detail: None) == CompileFailed("the compiler ended with exit code 1")
    child.close()
    monkeypatch.setattr(compile_job.sys, "executable", "/no/such/python")
    config = tiny_config(tiny_model, level=1, cache_dir=str(tmp_path / "new"))
    assert EAGER in build_engine(config, lambda *report: None).ready.summary


def test_a_compiler_ends_with_its_parent_and_tidies(tiny_model: str, tmp_path: Path) -> None:
    config = tiny_config(tiny_model)
    facts = program.facts_of(target_of(resolve_served(config), config))
    child = CompileChild(job(config, tmp_path, program.digest_of(facts)))

    class Begun(Exception):
        pass

    def stop(detail: str) -> None:
        if detail.startswith("piece"):
            raise Begun

    with pytest.raises(Begun):
        child.wait(stop)
    assert list((tmp_path / "v1").glob(".build-*"))
    child.close()
    assert not list((tmp_path / "v1").glob(".build-*"))
    assert CompileCache(tmp_path).why_unwritable() is None


def run_as_compiler(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this program stand for the compiler's process."""
    popen = subprocess.Popen
    monkeypatch.setattr(
        compile_job.subprocess,
        "Popen",
        lambda words, **kwargs: popen([sys.executable, "-c", code], **kwargs),
    )


BROKEN_PASS = """
import contextlib, runpy
from tokenspeed.compile import inductor_api
from tokenspeed.passes import rms_norm
inductor_api._best_isa_only = contextlib.nullcontext  # it does not get as far as to need one
object.__setattr__(rms_norm.PASS, "expected", lambda graph: 1 // 0)
runpy.run_module("tokenspeed.engine.compile_process", run_name="__main__", alter_sys=True)
"""


def test_a_pass_that_fails_stops_a_strict_start(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_as_compiler(BROKEN_PASS, monkeypatch)
    with pytest.raises(ConfigError) as caught:
        tiny_engine(
            tiny_model,
            level=1,
            strict_passes=True,
            cache_dir=str(tmp_path / "new"),
            dump_passes=str(tmp_path / "dump"),
        )
    assert str(caught.value) == (
        "--strict-passes: the pass rms_norm failed: integer division or modulo by zero; "
        "--disable-pass leaves a pass out"
    )
    names = sorted(path.name for path in (tmp_path / "dump").iterdir())
    assert names[:3] == [f"graph-{number}-0-after.txt" for number in range(3)]
    assert all(name.startswith("piece-") for name in names[3:]) and names[3:]


def test_messages_that_are_none_are_skipped(
    tiny_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = 'print("hello"); print(\'{"type":"compiling","detail":"x"}\'); raise SystemExit(7)'
    run_as_compiler(code, monkeypatch)
    details: list[str] = []
    child = CompileChild(job(tiny_config(tiny_model), tmp_path))
    assert child.wait(details.append) == CompileFailed("the compiler ended with exit code 7")
    child.close()
    assert "x" in details and Compiling("x").detail == "x"
