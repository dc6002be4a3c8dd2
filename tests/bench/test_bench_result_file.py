"""Where a result cannot be written, that is told in a line: before the measurement if it can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenspeed.bench import command, offline, result_file, serve
from tokenspeed.cli.main import main


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        ("latency smollm2 --output-json NOWHERE/x.json", "--output-json"),
        ("throughput smollm2 --output-json NOWHERE/x.json", "--output-json"),
        ("startup smollm2 --trace NOWHERE/x.json", "--trace"),
        ("serve --output-json NOWHERE/x.json", "--output-json"),
        ("serve --save-result --result-dir NOWHERE", "--save-result"),
    ],
)
def test_a_place_that_is_none_is_told_first(
    words: str,
    flag: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(offline, "make_llm", pytest.fail)
    monkeypatch.setattr(command, "measure", pytest.fail)
    monkeypatch.setattr(serve, "measure", pytest.fail)
    nowhere = tmp_path / "no"
    assert main(["bench", *words.replace("NOWHERE", str(nowhere)).split()]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line and line.endswith(f"there is no folder {nowhere}")


def test_a_disk_that_is_full_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert not result_file.write("latency", Path("/dev/full"), b"{}\n")
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "tokenspeed: error: bench latency: /dev/full: No space left on device"


def test_a_result_is_written(tmp_path: Path) -> None:
    assert result_file.write("latency", tmp_path / "x.json", b"{}\n")
    assert (tmp_path / "x.json").read_bytes() == b"{}\n"
