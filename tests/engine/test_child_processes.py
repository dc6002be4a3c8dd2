"""How the engine's process and the compiler's are started: from the installation, and without a
trace if they cannot be; and how their ends are told.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from engine_tiny import tiny_config

from tokenspeed.engine import client as client_module
from tokenspeed.engine.attached import EngineDead
from tokenspeed.engine.child import describe_end
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.compile_job import CompileChild, CompileFailed, CompileJob


@pytest.fixture
def poisoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder holds a module of a name that both import; the file it leaves if run."""
    mark = tmp_path / "was-run"
    (tmp_path / "msgspec.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.chdir(tmp_path)
    return mark


async def test_the_engine_imports_nothing_from_the_current_folder(poisoned: Path) -> None:
    client = EngineClient(tiny_config("/nowhere/at/all"))
    await client.start()
    try:
        with pytest.raises(EngineDead, match="no such folder"):
            await client.wait_ready()
    finally:
        await client.close()
    assert not poisoned.exists()


def test_the_compiler_imports_nothing_from_the_current_folder(
    poisoned: Path, tmp_path: Path
) -> None:
    config = tiny_config("/nowhere/at/all")
    child = CompileChild(CompileJob(config, str(tmp_path / "cache"), "0" * 16, 1))
    done = child.wait(lambda detail: None)
    child.close()
    assert isinstance(done, CompileFailed) and "no such folder" in done.message
    assert not poisoned.exists()


async def test_an_engine_that_cannot_be_started_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_module.sys, "executable", "/nowhere/python")
    client = EngineClient(tiny_config("/nowhere/at/all"))
    with pytest.raises(EngineDead, match=r"could not be started: .*/nowhere/python"):
        await client.start()
    assert client.state == "dead" and client._socket.closed and not client.folder.exists()
    with pytest.raises(EngineDead, match="could not be started"):
        await client.wait_ready()
    await client.close()


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("", "was killed by SIGKILL without a word"),
        (
            "01:00:33 INFO engine ready in 8.9 s\n01:00:34 DEBUG x\n",
            "was killed by SIGKILL without a word",
        ),
        (
            "01:00:33 WARNING memory is short\n01:00:34 INFO 3 requests run\n\n",
            "was killed by SIGKILL, after these lines: 01:00:33 WARNING memory is short",
        ),
        (
            "lost\n01:00:33 ERROR the engine died\nTraceback:\n  File x\nCUDA error: no INFO\n",
            "was killed by SIGKILL, after these lines: Traceback: | File x | CUDA error: no INFO",
        ),
    ],
    ids=["nothing", "routine", "a warning", "a traceback"],
)
async def test_the_last_words_of_an_engine_are_those_that_may_tell_why(
    said: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    python = tmp_path / "python"
    (tmp_path / "said").write_text(said)
    python.write_text(f"#!/bin/sh\ncat '{tmp_path}/said' >&2\nkill -KILL $$\n")
    python.chmod(0o700)
    monkeypatch.setattr(client_module.sys, "executable", str(python))
    client = EngineClient(tiny_config("/nowhere/at/all"))
    await client.start()
    with pytest.raises(EngineDead, match=f"^the engine process {re.escape(told)}$"):
        await client.wait_ready()
    await client.close()
    assert said in capfd.readouterr().err, "all of it stays on the log"


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("exit 0", "ended with exit code 0"),
        ("exit 3", "ended with exit code 3"),
        ("kill -KILL $$", "was killed by SIGKILL"),
        ("kill -35 $$", "was killed by signal 35"),
    ],
)
def test_every_end_has_words(command: str, told: str) -> None:
    """Also by a signal that has no name, as real-time ones."""
    assert describe_end(subprocess.run(["sh", "-c", command]).returncode) == told
