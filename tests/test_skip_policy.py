"""The plugin that lets CI skip only what is written down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import skip_policy

TESTS = """
import pytest
def test_skipped():
    pytest.skip("just so")
@pytest.mark.xfail
def test_expected():
    assert False
def test_runs():
    pass
"""


def run(folder: Path, *options: str, ci: bool, allowed: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_some.py").write_text(TESTS)
    (folder / "skip_policy.py").write_text(Path(skip_policy.__file__).read_text())
    (folder / "skips.txt").write_text(allowed)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\naddopts = -p skip_policy\n")
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # importing all takes seconds
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "xdist", *options],
        cwd=folder,
        env=environ | ({"CI": "true"} if ci else {}),
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize("options", [(), ("-n", "2")], ids=["one process", "two processes"])
def test_an_unlisted_skip_fails_in_ci(tmp_path: Path, options: tuple[str, ...]) -> None:
    done = run(tmp_path, *options, ci=True, allowed="# nothing\n")
    assert done.returncode == 1
    assert "skipped, but not in tests/skips.txt: test_some.py::test_skipped" in done.stdout


def test_a_listed_skip_passes_in_ci(tmp_path: Path) -> None:
    assert run(tmp_path, ci=True, allowed="test_some.py::*  # needs a moon\n").returncode == 0


def test_people_may_skip(tmp_path: Path) -> None:
    assert run(tmp_path, ci=False, allowed="").returncode == 0


def test_a_pattern_needs_a_reason() -> None:
    assert skip_policy.read_patterns("# only a comment\n\na*  # why\n") == ["a*"]
    with pytest.raises(ValueError, match="no reason"):
        skip_policy.read_patterns("tests/gpu/*\n")


def test_the_real_file_can_be_read() -> None:
    assert skip_policy.read_patterns(skip_policy.ALLOWED.read_text())
