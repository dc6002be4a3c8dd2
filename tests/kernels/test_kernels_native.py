"""The shared object of CPU kernels: its name, its building, and what is said when there is none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tokenspeed.kernels import native
from tokenspeed.kernels.native import BuildError


def test_its_name_tells_sources_and_instruction_sets_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    name = native.file_name()
    assert name == native.file_name()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    assert native.file_name() != name
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    copy = tmp_path / "cpu"
    shutil.copytree(native.FOLDER, copy)
    monkeypatch.setattr(native, "FOLDER", copy)
    assert native.file_name() == name, "where the sources lie is no part of it"
    (copy / "vector.h").write_text((copy / "vector.h").read_text() + "\n")
    assert native.file_name() != name


def test_building_says_why_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "native.so"
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
    with pytest.raises(BuildError, match="not for SVE256"):
        native.build(target)
    with pytest.raises(BuildError, match="not for SVE256"):
        native.file_name()
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="install g\\+\\+"):
        native.build(target)
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 1\n")
    broken.chmod(0o700)
    with pytest.raises(BuildError, match="no such flag"):
        native.build(target)
    assert not target.exists()
    target.write_bytes(b"\x7fELF, half of it")
    with pytest.raises(BuildError, match="holds no CPU kernels"):
        native.load(target)
