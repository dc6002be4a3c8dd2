"""A process's home of compiled kernels: filled with what is kept, and what is new in it is kept.

Triton itself compiles for a GPU that is not there, and finds its kernel again in another home.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from kernel_cases import (
    ENVIRONMENT,
    KEY,
    PREFILL,
    all_kinds,
    fill_triton,
    fill_workspace,
    flashinfer_build,
    triton_kernel,
    triton_module,
)

from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.kernel_home import PREFIX, KernelHome
from tokenspeed.compile.kernel_store import Kernel, folders_of, read_kernel, store_kernel


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def kept(root: Path) -> list[Kernel]:
    return [read_kernel(folder) for folder in folders_of(root, ENVIRONMENT)]


def fill(home: KernelHome) -> None:
    fill_triton(home.triton, triton_kernel())
    fill_triton(home.triton, triton_module())
    fill_workspace(home.workspace, flashinfer_build())


def test_what_is_new_is_kept_once(root: Path) -> None:
    home = KernelHome(root, ENVIRONMENT)
    assert home.keep() == []
    fill(home)
    assert home.keep() == [kernel.place for kernel in all_kinds()]
    assert kept(root) == all_kinds() and home.keep() == []
    home.close()


def test_a_later_home_has_what_was_kept(root: Path) -> None:
    for kernel in all_kinds():
        store_kernel(root, kernel)
    home = KernelHome(root, ENVIRONMENT)
    folder = home.triton / KEY
    group = json.loads((folder / "__grp__fill.json").read_text())["child_paths"]
    assert group == {name: str(folder / name) for name in ("fill.cubin", "fill.json")}
    assert (home.builds / PREFILL / f"{PREFILL}.so").read_bytes() == b"\x7fELFprefill"
    assert (home.triton / triton_module().key).is_dir()
    assert home.keep() == []
    home.close()
    other = KernelHome(root, "0" * 16)
    assert not list(other.triton.iterdir()) and not list(other.builds.iterdir())
    other.close()


def test_what_is_not_finished_is_not_kept(root: Path) -> None:
    home = KernelHome(root, ENVIRONMENT)
    fill_triton(home.triton, triton_kernel(), is_finished=False)
    (home.triton / ("C" * 52)).mkdir()
    (home.triton / "notes").mkdir()
    fill_triton(home.triton, Kernel("triton", ENVIRONMENT, "D" * 52, {"x.so": b"no object"}))
    assert home.keep() == [] and kept(root) == []
    home.close()


def test_what_was_only_tried_is_left_out(root: Path) -> None:
    home = KernelHome(root, ENVIRONMENT)
    fill_triton(home.triton, triton_kernel())
    fill_triton(home.triton, triton_module())
    home.leave_out()
    fill_triton(home.triton, triton_kernel("E" * 52))
    places = {triton_module().place, triton_kernel("E" * 52).place}
    assert set(home.keep()) == places and home.keep() == []
    home.close()
    assert len(kept(root)) == 2


def test_the_end_of_a_process_keeps_and_tidies(root: Path) -> None:
    home = KernelHome(root, ENVIRONMENT)
    place = home.triton.parent
    assert place.parent == root / "v1" and place.name.startswith(PREFIX)
    assert place.stat().st_mode & 0o777 == 0o700
    fill(home)
    home._owner = os.getpid() + 1
    home.close()
    assert place.is_dir() and kept(root) == [], "it is another process's"
    home._owner = os.getpid()
    home.close()
    home.close()
    assert not place.exists() and kept(root) == all_kinds()
    assert CompileCache(root).entry_folders() == []


def test_homes_of_killed_processes_are_swept_unless_one_still_lives(root: Path) -> None:
    home = KernelHome(root, ENVIRONMENT)
    left = root / "v1" / f"{PREFIX}left"
    (left / "triton").mkdir(parents=True)
    old = time.time() - 100_000
    for path in (left, home.triton.parent):
        os.utime(path, (old, old))
    KernelHome(root, ENVIRONMENT).close()
    assert not left.exists() and home.triton.is_dir()
    home.close()


def test_a_damaged_kernel_is_set_aside_and_made_anew(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for kernel in all_kinds():
        store_kernel(root, kernel)
    os.truncate(root / triton_kernel().place / "fill.cubin", 2)
    (root / flashinfer_build().place / "kernel.so").write_bytes(b"\x7fELFother")
    home = KernelHome(root, ENVIRONMENT)
    assert "6YQNJ" in caplog.text and "kernel.so is not what was written" in caplog.text
    assert [at.name for at in home.triton.iterdir()] == [triton_module().key]
    assert not list(home.builds.iterdir())
    fill_triton(home.triton, triton_kernel())
    fill_workspace(home.workspace, flashinfer_build())
    assert len(home.keep()) == 2 and kept(root) == all_kinds()
    home.close()


def test_what_others_may_write_is_left_alone(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kernel in all_kinds():
        store_kernel(root, kernel)
    (root / triton_kernel().place).chmod(0o777)
    home = KernelHome(root, ENVIRONMENT)
    assert not (home.triton / KEY).exists() and (root / triton_kernel().place).is_dir()
    home.close()
    (root / "triton").chmod(0o777)
    home = KernelHome(root, ENVIRONMENT)
    assert not list(home.triton.iterdir())
    assert caplog.text.count("others may write") == 2
    fill_triton(home.triton, triton_kernel("E" * 52))
    with caplog.at_level(logging.INFO, logger="tokenspeed"):
        assert home.keep() == []
    assert "compiled kernels are not kept: " in caplog.text
    assert caplog.text.count("others may write") == 3
    home.close()


def test_without_a_cache_folder_there_is_a_home(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    home = KernelHome(tmp_path / "file" / "root", ENVIRONMENT)
    fill(home)
    assert home.triton.is_dir() and home.keep() == []
    home.close()
    assert not home.triton.exists()


KERNEL = """
import sys
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def fill(out, value, size, block: tl.constexpr):
    index = tl.arange(0, block)
    tl.store(out + index, value, mask=index < size)


def heard(*, cache_hit, **others):
    print("hit" if cache_hit else "compiled")


triton.knobs.compilation.listener = heard
signature = {"out": "*fp32", "value": "fp32", "size": "i32", "block": "constexpr"}
made = triton.compile(ASTSource(fill, signature, {"block": 64}), target=GPUTarget("cuda", 90, 32))
print(made.asm["cubin"][:4], made.metadata.name)
"""


def compile_in(home: KernelHome, program: Path) -> str:
    program.parent.mkdir()
    program.write_text(KERNEL)
    variables = {**os.environ, "TRITON_CACHE_DIR": str(home.triton), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [sys.executable, str(program)], env=variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_triton_finds_its_kernel_in_another_home(tmp_path: Path, root: Path) -> None:
    """Nothing in its key depends on where the cache is, or the source."""
    first = KernelHome(root, ENVIRONMENT)
    assert compile_in(first, tmp_path / "a" / "one.py").splitlines()[0] == "compiled"
    (place,) = first.keep()
    first.close()
    assert not first.triton.exists()
    assert {path.name for path in (root / place).iterdir()} == {
        *("SHA256SUMS", "fill.cubin", "fill.json")
    }
    second = KernelHome(root, ENVIRONMENT)
    said = compile_in(second, tmp_path / "b" / "two.py").splitlines()
    assert said == ["hit", "b'\\x7fELF' fill"]
    assert second.keep() == []
    second.close()


@pytest.mark.parametrize("breaks", [False, True])
def test_a_home_that_is_gone_holds_nothing(
    root: Path, breaks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(home: KernelHome) -> None:
        raise OSError(28, "No space left on device")

    KernelHome(root, ENVIRONMENT).close()
    before = os.listdir("/proc/self/fd")
    if breaks:
        monkeypatch.setattr(KernelHome, "_fill", full)
        with pytest.raises(OSError, match="No space"):
            KernelHome(root, ENVIRONMENT)
    else:
        KernelHome(root, ENVIRONMENT).close()
    assert os.listdir("/proc/self/fd") == before
    assert not list((root / "v1").glob(f"{PREFIX}*"))
