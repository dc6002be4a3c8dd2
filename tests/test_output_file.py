"""Files that cannot be written are told before the work that they are for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tokenspeed.options import ConfigError
from tokenspeed.output_file import check_target


def test_what_can_be_written_is_left_alone(tmp_path: Path) -> None:
    check_target("--export", str(tmp_path / "x.tar"))
    assert not list(tmp_path.iterdir())
    (tmp_path / "x.tar").write_text("old")
    check_target("--export", tmp_path / "x.tar")
    assert (tmp_path / "x.tar").read_text() == "old"
    check_target("--output-json", "/dev/null")


def test_what_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--export .*/x.tar: there is no folder .*/no$"):
        check_target("--export", tmp_path / "no" / "x.tar")
    with pytest.raises(ConfigError, match="this is a folder; name a file"):
        check_target("--export", tmp_path)
    (tmp_path / "old").write_text("")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for name, what in (("new", tmp_path), ("old", tmp_path / "old")):
        with pytest.raises(ConfigError, match=f"{what} cannot be written$"):
            check_target("--export", tmp_path / name)
