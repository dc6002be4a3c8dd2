"""Entries on their way through an archive: whole or refused, and into the cache as a compile is."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from compile_entries import FACTS, PIECE, fill, found
from kernel_cases import ELF, ENVIRONMENT, KEY, all_kinds, flashinfer_build, triton_kernel

from tokenspeed.compile import inductor_api, transfer
from tokenspeed.compile.archive import ArchiveError, read_archive, write_archive
from tokenspeed.compile.cache import CompileCache
from tokenspeed.compile.entry import Contents, Entry
from tokenspeed.compile.facts import digest_of
from tokenspeed.compile.kernel_store import Kernel, store_kernel
from tokenspeed.compile.transfer import (
    install,
    install_device_kernels,
    install_kernels,
    pack,
    unpack,
)

OTHER = FACTS | {"compile": {"dtype": "bfloat16"}}
KERNELS = f"native-{'0' * 16}.so"
PLACE = f"v1/m-{digest_of(FACTS)}"
TRITON, BUILD = triton_kernel().place, flashinfer_build().place


@pytest.fixture
def members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Of an archive with two entries, one with a tuning table, and kernels of CPU and GPU."""
    cache = CompileCache(tmp_path / "from")
    entries = [cache.store(FACTS, "m", fill), cache.store(OTHER, "m", fill)]
    entries[0].write_tuning(b"[1]")
    (cache.root / "native").mkdir(mode=0o700)
    (cache.root / "native" / KERNELS).write_bytes(b"kernels")
    (cache.root / "native" / f"native-{'1' * 16}.so").write_bytes(b"of another CPU")
    monkeypatch.setattr(transfer.native, "file_name", lambda: KERNELS)
    for kernel in (*all_kinds(), triton_kernel(environment="f" * 16)):
        store_kernel(cache.root, kernel)
    return pack(cache, entries)


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "to")


def test_what_is_packed_arrives_as_it_was(
    tmp_path: Path, members: dict[str, bytes], cache: CompileCache
) -> None:
    digest = write_archive(tmp_path / "a.tar", members)
    bundle = unpack(read_archive(tmp_path / "a.tar", digest))
    assert [install(cache, packed) for packed in bundle.entries] == [True, True]
    assert install_kernels(cache, bundle.kernels) == [KERNELS]
    assert bundle.device_kernels == sorted(all_kinds(), key=lambda kernel: kernel.place)
    for counts in ({"triton": 2, "flashinfer": 1}, {}):
        assert install_device_kernels(cache, bundle.device_kernels) == counts
    for name, data in members.items():
        assert (cache.root / name).read_bytes() == data
        assert (cache.root / name).stat().st_mode & 0o777 == 0o600
    assert found(cache).read_tuning() == b"[1]"
    kept = (cache.root / "native" / f"{KERNELS}.sha256").read_text()
    assert kept == hashlib.sha256(b"kernels").hexdigest()
    assert len(list((cache.root / "native").iterdir())) == 2
    assert pack(cache, [found(cache), found(cache, OTHER)]) == members


def test_what_is_there_stays(members: dict[str, bytes], cache: CompileCache) -> None:
    def another(folder: Path) -> Contents:
        contents = fill(folder)
        (folder / "plan.json").write_text("{ }")
        return contents

    there = cache.store(FACTS, "name", another)
    there.write_tuning(b"[2]")
    first, second = unpack(members).entries
    by_facts = {packed.manifest.facts["compile"]["dtype"]: packed for packed in (first, second)}
    assert not install(cache, by_facts["float32"]) and install(cache, by_facts["bfloat16"])
    assert found(cache).files["plan.json"] == b"{ }"
    assert found(cache).read_tuning() == b"[2]"


def test_a_damaged_entry_is_replaced(members: dict[str, bytes], cache: CompileCache) -> None:
    there = cache.store(FACTS, "name", fill)
    os.truncate(there.folder / PIECE, 3)
    assert all(install(cache, packed) for packed in unpack(members).entries)
    assert isinstance(cache.look(FACTS), Entry)


def test_a_cache_that_others_may_write_is_not_filled(
    members: dict[str, bytes], cache: CompileCache
) -> None:
    (cache.root / "v1").mkdir(parents=True)
    (cache.root / "v1").chmod(0o777)
    bundle = unpack(members)
    with pytest.raises(OSError, match="others may write"):
        install(cache, bundle.entries[0])
    (cache.root / "native").mkdir()
    (cache.root / "native").chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        install_kernels(cache, bundle.kernels)
    assert not [path for path in cache.root.rglob("*") if path.is_file()]


def test_an_import_that_breaks_off_leaves_nothing(
    members: dict[str, bytes], cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        install(cache, unpack(members).entries[0])
    assert not [path for path in cache.root.rglob("*") if not path.name.endswith(".lock")][1:]


def members_of(kernel: Kernel) -> dict[str, bytes]:
    return {f"{kernel.place}/{name}": data for name, data in kernel.files.items()}


def rename(members: dict[str, bytes], place: str) -> None:
    for name in [name for name in members if name.startswith(PLACE)]:
        members[place + name.removeprefix(PLACE)] = members.pop(name)


Change = Callable[[dict[str, bytes]], object]
CHANGES: dict[str, tuple[Change, str]] = {
    "no READY": (lambda m: m.pop(f"{PLACE}/READY"), "READY is missing"),
    "no manifest": (lambda m: m.pop(f"{PLACE}/manifest.json"), "manifest.json is missing"),
    "no plan": (lambda m: m.pop(f"{PLACE}/plan.json"), "'plan.json' is not both in"),
    "one more": (lambda m: m.update({f"{PLACE}/x": b""}), "'x' is not both in"),
    "other bytes": (lambda m: m.update({f"{PLACE}/{PIECE}": b"x"}), f"{PIECE} is not what was"),
    "other manifest": (
        lambda m: m.update({f"{PLACE}/manifest.json": b"{}"}),
        "READY does not belong to the manifest",
    ),
    "other name": (
        lambda m: rename(m, f"v1/m-{'0' * 16}"),
        "its facts are not those of its name",
    ),
    "elsewhere": (lambda m: m.update({"v2/x/y": b""}), "v2/x/y has no place in a cache"),
    "a lone file": (lambda m: m.update({"v1/x": b""}), "v1/x has no place in a cache"),
    "a kernel too deep": (
        lambda m: m.update({f"{TRITON}/x/fill.json": b""}),
        f"{TRITON}/x/fill.json has no place in a cache",
    ),
    "a kernel too high": (
        lambda m: m.update({f"triton/{KEY}/fill.json": b""}),
        f"triton/{KEY}/fill.json has no place in a cache",
    ),
    "a kernel of no environment": (
        lambda m: m.update({f"triton/x/{KEY}/fill.json": b""}),
        f"triton/x/{KEY}: no kernel is called so",
    ),
    "a kernel of another environment": (
        lambda m: m.update(members_of(triton_kernel(environment="f" * 16))),
        f"triton/{'f' * 16}/{KEY}: it is for the environment of no entry here",
    ),
    "a kernel of no key": (
        lambda m: m.update({f"triton/{ENVIRONMENT}/cache/fill.json": b""}),
        f"triton/{ENVIRONMENT}/cache: no kernel is called so",
    ),
    "half a kernel": (
        lambda m: m.pop(f"{TRITON}/fill.json"),
        f"{TRITON}: 'fill.cubin' is not all of one kernel",
    ),
    "a group": (
        lambda m: m.update({f"{TRITON}/__grp__fill.json": b'{"child_paths": {"x": "/etc"}}'}),
        "is not all of one kernel",
    ),
    "a kernel's sums": (lambda m: m.update({f"{TRITON}/SHA256SUMS": b""}), "is not all of one"),
    "a script": (
        lambda m: m.update({f"triton/{ENVIRONMENT}/{'A' * 52}/sitecustomize.py": ELF}),
        "'sitecustomize.py' is not all of one kernel",
    ),
    "no binary": (lambda m: m.update({f"{TRITON}/fill.cubin": b"#!/bin/sh"}), "is no object"),
    "no metadata": (lambda m: m.update({f"{TRITON}/fill.json": b"7"}), "metadata cannot be read"),
    "a build of ninja's": (
        lambda m: m.update({f"{BUILD}/build.ninja": b""}),
        f"{BUILD}: a build has the files name and kernel.so",
    ),
    "a build elsewhere": (
        lambda m: m.update({f"{BUILD}/name": b"../../.."}),
        "the build of '../../..' is not called so",
    ),
    "a build called as another": (
        lambda m: m.update({f"{BUILD}/name": b"batch_prefill"}),
        "the build of 'batch_prefill' is not called so",
    ),
    "odd kernels": (lambda m: m.update({"native/libc.so": b""}), "has no place in a cache"),
    "nothing": (lambda m: m.clear(), "there is no entry in it"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_is_no_whole_entry_is_refused(members: dict[str, bytes], kind: str) -> None:
    change, reason = CHANGES[kind]
    change(members)
    with pytest.raises(ArchiveError) as error:
        unpack(members)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_damaged_kernel_stays_behind(
    members: dict[str, bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CompileCache(tmp_path / "from")
    os.truncate(cache.root / TRITON / "fill.cubin", 5)
    packed = pack(cache, [found(cache), found(cache, OTHER)])
    assert members.keys() - packed.keys() == {f"{TRITON}/fill.cubin", f"{TRITON}/fill.json"}
    assert "is left out: fill.cubin is not what was written" in caplog.text
    assert (cache.root / TRITON).is_dir(), "only a start sets it aside"


def test_kernels_are_not_put_where_others_may_write(
    members: dict[str, bytes], cache: CompileCache
) -> None:
    (cache.root / "triton").mkdir(parents=True)
    (cache.root / "triton").chmod(0o777)
    with pytest.raises(OSError, match="others may write"):
        install_device_kernels(cache, unpack(members).device_kernels)
    assert not [path for path in cache.root.rglob("*") if path.is_file()]


def test_a_kernel_that_is_there_stays(members: dict[str, bytes], cache: CompileCache) -> None:
    there = replace(triton_kernel(), files={**triton_kernel().files, "fill.cubin": ELF})
    store_kernel(cache.root, there)
    counts = install_device_kernels(cache, unpack(members).device_kernels)
    assert counts == {"triton": 1, "flashinfer": 1}
    assert (cache.root / TRITON / "fill.cubin").read_bytes() == ELF


def test_nothing_is_loaded_on_the_way(
    members: dict[str, bytes], cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor_api, "load", None)
    monkeypatch.setattr(transfer.native, "load", None)
    bundle = unpack(members)
    for packed in bundle.entries:
        install(cache, packed)
    install_kernels(cache, bundle.kernels)


def test_kernels_without_a_digest_are_given_one(
    members: dict[str, bytes], cache: CompileCache
) -> None:
    """Who was stopped between the two left kernels that nobody takes."""
    kernels = unpack(members).kernels
    assert install_kernels(cache, kernels) == [KERNELS]
    (cache.root / "native" / f"{KERNELS}.sha256").unlink()
    assert install_kernels(cache, kernels) == [KERNELS]
    assert install_kernels(cache, kernels) == []
    shutil.rmtree(cache.root)
    assert install_kernels(cache, {}) == [] and not cache.root.exists()
