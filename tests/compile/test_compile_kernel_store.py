"""Kept GPU kernels: whole and checked, or not there; and nothing else is ever among them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from kernel_cases import (
    ELF,
    ENVIRONMENT,
    KEY,
    LAUNCHER,
    PREFILL,
    all_kinds,
    flashinfer_build,
    triton_kernel,
    triton_module,
)

from tokenspeed.compile import kernel_store
from tokenspeed.compile.entry import Damaged
from tokenspeed.compile.kernel_store import (
    FLASHINFER,
    SUMS,
    TRITON,
    Kernel,
    check_kernel,
    environment_of,
    environments,
    folders_of,
    kernel_folders,
    read_kernel,
    remove_folder,
    set_aside,
    store_kernel,
    thin,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


def kept(root: Path, environment: str = ENVIRONMENT) -> list[Kernel]:
    return [read_kernel(folder) for folder in folders_of(root, environment)]


@pytest.mark.parametrize("kernel", all_kinds(), ids=lambda kernel: kernel.kind)
def test_what_is_stored_is_read(root: Path, kernel: Kernel) -> None:
    assert kept(root) == []
    assert store_kernel(root, kernel) and not store_kernel(root, kernel)
    assert kept(root) == [kernel] and kept(root, "0" * 16) == []
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600)


def test_sums_are_those_of_sha256sum(root: Path) -> None:
    store_kernel(root, triton_kernel())
    folder = root / triton_kernel().place
    command = ["sha256sum", "--status", "--strict", "-c", SUMS]
    assert subprocess.run(command, cwd=folder).returncode == 0
    (folder / "fill.cubin").write_bytes(ELF)
    assert subprocess.run(command, cwd=folder).returncode == 1


def test_the_environment_is_versions_machine_and_settings() -> None:
    facts = {"versions": {"torch": "2"}, "machine": {"gpu": "x"}, "settings": {}, "model": {}}
    assert environment_of(facts) == environment_of(facts | {"model": {"layers": 2}})
    for name in ("versions", "machine", "settings"):
        assert environment_of(facts) != environment_of(facts | {name: {"other": "1"}})


METADATA = triton_kernel().files["fill.json"]
ODD: dict[str, Kernel] = {
    "kind": replace(triton_kernel(), kind="native"),
    "environment": replace(triton_kernel(), environment="../../etc"),
    "key": replace(triton_kernel(), key="x" * 52),
    "long key": replace(triton_kernel(), key=KEY + "A"),
    "no file": replace(triton_kernel(), files={}),
    "no binary": replace(triton_kernel(), files={"fill.json": METADATA}),
    "one more": replace(triton_kernel(), files={**triton_kernel().files, "x.so": ELF}),
    "group": replace(triton_kernel(), files={"__grp__fill.json": b"{}"}),
    "other name": replace(triton_kernel(), files={"a.json": METADATA, "b.cubin": ELF}),
    "no object": replace(triton_kernel(), files={"fill.json": METADATA, "fill.cubin": b"MZ"}),
    "no module": replace(triton_module(), files={LAUNCHER: b"import os"}),
    "a script": replace(triton_module(), files={"x.py": ELF}),
    "hidden": replace(triton_module(), files={".x.so": ELF}),
    "no metadata": replace(triton_kernel(), files={"fill.json": b"[" * 9000, "fill.cubin": ELF}),
    "no name": replace(triton_kernel(), files={"fill.json": b"{}", "fill.cubin": ELF}),
    "build alone": replace(flashinfer_build(), files={"kernel.so": ELF}),
    "build of another": replace(flashinfer_build(), files=flashinfer_build("other").files),
    "build elsewhere": flashinfer_build("../../../home"),
    "build of none": replace(
        flashinfer_build(), files={"kernel.so": b"", "name": PREFILL.encode()}
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_kernel_is_not_kept(root: Path, kind: str) -> None:
    with pytest.raises(Damaged) as error:
        store_kernel(root, ODD[kind])
    assert "\n" not in str(error.value) and not root.exists()


def rewrite_sums(folder: Path, change: Callable[[str], str]) -> None:
    (folder / SUMS).write_text(change((folder / SUMS).read_text()))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut short": (lambda at: os.truncate(at / "fill.cubin", 3), "fill.cubin is not what was"),
    "gone": (lambda at: (at / "fill.json").unlink(), "fill.json is gone"),
    "no sums": (lambda at: (at / SUMS).unlink(), f"{SUMS} is gone"),
    "empty sums": (lambda at: rewrite_sums(at, lambda _: ""), f"{SUMS} cannot be read"),
    "odd sums": (lambda at: rewrite_sums(at, lambda text: text + "x\n"), f"{SUMS} cannot be read"),
    "outside": (
        lambda at: rewrite_sums(at, lambda text: text.replace("fill.json", "../../x")),
        f"{SUMS} cannot be read",
    ),
    "above": (
        lambda at: rewrite_sums(at, lambda text: text.replace("fill.json", "..")),
        f"{SUMS} cannot be read",
    ),
    "a link": (
        lambda at: ((at / "fill.json").unlink(), (at / "fill.json").symlink_to("/etc/passwd")),
        "is gone, or no file",
    ),
    "one missing": (
        lambda at: rewrite_sums(at, lambda text: text.splitlines(keepends=True)[0]),
        "is not all of one kernel",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_what_is_damaged_is_not_read(root: Path, kind: str) -> None:
    damage, reason = DAMAGE[kind]
    store_kernel(root, triton_kernel())
    folder = root / triton_kernel().place
    damage(folder)
    with pytest.raises(Damaged) as error:
        read_kernel(folder)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_what_others_may_write_is_not_trusted(root: Path) -> None:
    store_kernel(root, triton_kernel())
    folder = root / triton_kernel().place
    (folder / "fill.cubin").chmod(0o666)
    with pytest.raises(OSError, match="others may write"):
        read_kernel(folder)
    (root / TRITON).chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        environments(root)
    with pytest.raises(OSError, match="others may write"):
        store_kernel(root, triton_module())


def test_a_store_that_breaks_off_leaves_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(OSError, match="No space left"):
        store_kernel(root, triton_kernel())
    assert not [path for path in root.rglob("*") if path.is_file()]


def test_only_kernels_are_listed(root: Path) -> None:
    for kernel in all_kinds():
        store_kernel(root, kernel)
    place = root / TRITON / ENVIRONMENT
    (root / TRITON / "notes").mkdir()
    (place / "notes").mkdir()
    (place / ("B" * 52)).symlink_to(place / KEY)
    assert [at.name for at in environments(root)] == [ENVIRONMENT] * 2
    assert [at.parent.name for at in environments(root)] == [TRITON, FLASHINFER]
    assert {at.name for at in kernel_folders(place)} == {KEY, triton_module().key}


def test_those_made_last_stay(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [letter * 52 for letter in "ABCD"]
    for age, key in enumerate(reversed(keys)):
        store_kernel(root, triton_kernel(key))
        os.utime(root / triton_kernel(key).place, (time.time() - age,) * 2)
    place = root / TRITON / ENVIRONMENT
    old = time.time() - 100_000
    for name in (".keep-old", ".aside-old", ".keep-new"):
        (place / name).mkdir()
        os.utime(place / name, (old, old) if name.endswith("old") else None)
    thin(place)
    assert len(kernel_folders(place)) == 4
    monkeypatch.setattr(kernel_store, "MAX_KEPT", 2)
    thin(place)
    assert [at.name for at in kernel_folders(place)] == keys[2:]
    assert {at.name for at in place.glob(".*")} == {".keep-new"}


def test_what_is_set_aside_is_kept_for_a_day(root: Path) -> None:
    """However old it was."""
    store_kernel(root, triton_kernel())
    folder = root / triton_kernel().place
    old = time.time() - 100_000
    os.utime(folder, (old, old))
    aside = set_aside(folder)
    thin(folder.parent)
    assert aside is not None and aside.exists()
    os.utime(aside, (old, old))
    thin(folder.parent)
    assert not aside.exists()


def test_what_is_removed_is_gone(root: Path) -> None:
    store_kernel(root, triton_kernel())
    remove_folder(root / TRITON / ENVIRONMENT)
    assert environments(root) == [] and not list((root / TRITON).iterdir())
    with pytest.raises(OSError, match="cannot be moved"):
        remove_folder(root / TRITON / ENVIRONMENT)


def test_what_there_is_is_checked_as_it_is() -> None:
    for kernel in all_kinds():
        check_kernel(kernel)
