"""Standard output that cannot be written: one line, and a status that says so."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenspeed.cli.main import main

COMMANDS = (
    *("version", "env", "help", "serve --help", "serve --print-config=all", "bench startup --help"),
    *("cache ls", "cache ls --json", "cache prune --older-than 1d", "cache verify"),
)
LOST = "tokenspeed: error: cannot write standard output: No space left on device\n"


def nowhere(kind: str) -> int:
    """A file descriptor that takes nothing."""
    if kind == "a full disk":
        return os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("kind", ["a full disk", "a reader that has gone"])
@pytest.mark.parametrize("is_buffered", [True, False], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_tells_that_its_output_is_lost(
    command: str,
    is_buffered: bool,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("TOKENSPEED_CACHE_DIR", str(tmp_path))
    raw = io.FileIO(nowhere(kind), "w")
    binary = io.BufferedWriter(raw) if is_buffered else raw
    with io.TextIOWrapper(binary, write_through=not is_buffered) as stream:  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(command.split()) == 1
        assert sys.stdout is stream
    assert capsys.readouterr().err == (LOST if kind == "a full disk" else "")
    assert not caplog.messages


def test_a_mistake_is_told_before_what_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(["serve", "--prot", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err


def test_no_standard_output_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["version"]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_the_interpreter_s_end_adds_nothing(unbuffered: str) -> None:
    """It writes once more what is left."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "tokenspeed", "version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, LOST)
