"""Entries into an archive's members, and out of them into a cache.

    v1/SLUG-DIGEST/...    every file of an entry, with its manifest and READY; and tuning.json
    native/NAME.so        compiled CPU kernels, which all entries of a cache share (`engine.native`)
    triton/..., flashinfer/...    compiled GPU kernels of the entries' environments, each a folder
                          of `kernel_store.py` without its sums

What arrives goes into the cache as a compile does (`CompileCache.store`): lock, temporary folder,
READY, rename. Nothing of it is loaded here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenspeed.compile.archive import ArchiveError
from tokenspeed.compile.cache import VERSION, CompileCache
from tokenspeed.compile.entry import (
    MANIFEST,
    READY,
    TUNING,
    Contents,
    Damaged,
    Entry,
    Manifest,
    check_file,
    check_whole,
    parse_manifest,
)
from tokenspeed.compile.facts import digest_of
from tokenspeed.compile.kernel_store import (
    KINDS,
    Kernel,
    check_kernel,
    environment_of,
    folders_of,
    read_kernel,
    store_kernel,
)
from tokenspeed.compile.trust import check_folder, own_folder, read_own_file, write_file
from tokenspeed.kernels import native
from tokenspeed.log import logger

NATIVE = "native"
"""The folder of the CPU kernels, beside that of the entries."""

_NATIVE_FILE = re.compile(r"native-[0-9a-f]{16}\.so")


@dataclass(frozen=True)
class PackedEntry:
    """An entry on its way: its files, without manifest, READY and tuning table."""

    name: str
    manifest: Manifest
    files: Mapping[str, bytes]
    tuning: bytes | None


@dataclass(frozen=True)
class Bundle:
    """What an archive holds, checked: entries, CPU kernels by file name, and GPU kernels."""

    entries: list[PackedEntry] = field(default_factory=list)
    kernels: dict[str, bytes] = field(default_factory=dict)
    device_kernels: list[Kernel] = field(default_factory=list)


def pack(cache: CompileCache, entries: Collection[Entry]) -> dict[str, bytes]:
    """The members of an archive of these entries. Raises OSError for what cannot be read."""
    members: dict[str, bytes] = {}
    for entry in entries:
        place = f"{VERSION}/{entry.folder.name}"
        files = {name: read_own_file(entry.folder / name) for name in (MANIFEST, READY)}
        if (tuning := entry.read_tuning()) is not None:
            files[TUNING] = tuning
        members |= {f"{place}/{name}": data for name, data in (files | entry.files).items()}
    if name := _kernel_name():
        path = cache.root / NATIVE / name
        with contextlib.suppress(FileNotFoundError):
            check_folder(cache.root)
            check_folder(path.parent)
            members[f"{NATIVE}/{name}"] = read_own_file(path)
    for environment in {environment_of(entry.manifest.facts) for entry in entries}:
        members |= _device_kernels(cache.root, environment)
    return members


def unpack(members: Mapping[str, bytes]) -> Bundle:
    """What the members of an archive are. Raises ArchiveError where they are no whole entries."""
    by_entry: dict[str, dict[str, bytes]] = {}
    by_kernel: dict[tuple[str, str, str], dict[str, bytes]] = {}
    bundle = Bundle()
    for name, data in members.items():
        kind, place, *rest = name.split("/")
        if kind == VERSION and rest:
            by_entry.setdefault(place, {})["/".join(rest)] = data
        elif kind == NATIVE and not rest and _NATIVE_FILE.fullmatch(place):
            bundle.kernels[place] = data
        elif kind in KINDS and len(rest) == 2:
            by_kernel.setdefault((kind, place, rest[0]), {})[rest[1]] = data
        else:
            raise ArchiveError(f"{name} has no place in a cache")
    bundle.entries.extend(_packed_entry(name, files) for name, files in by_entry.items())
    if not bundle.entries:
        raise ArchiveError("there is no entry in it")
    known = {environment_of(packed.manifest.facts) for packed in bundle.entries}
    for identity, files in by_kernel.items():
        bundle.device_kernels.append(_kernel(Kernel(*identity, files), known))
    return bundle


def install(cache: CompileCache, packed: PackedEntry) -> bool:
    """Put an entry into the cache; False if it is there, and stays as it is. Raises OSError where
    nothing can be written.
    """
    if isinstance(cache.find(packed.manifest.facts), Entry):
        return False
    entry = cache.store(
        packed.manifest.facts,
        packed.name.rpartition("-")[0],
        lambda folder: _fill(folder, packed),
    )
    if packed.tuning is not None and entry.read_tuning() is None:
        entry.write_tuning(packed.tuning)
    return True


def install_kernels(cache: CompileCache, kernels: Mapping[str, bytes]) -> list[str]:
    """Put CPU kernels into the cache, with their digests; the names of those that were not there.
    Raises OSError where nothing can be written.
    """
    folder = cache.root / NATIVE
    if kernels:
        own_folder(cache.root)
        own_folder(folder)
    new = [name for name in kernels if not os.path.lexists(folder / f"{name}.sha256")]
    for name in new:
        digest = hashlib.sha256(kernels[name]).hexdigest().encode()
        with tempfile.TemporaryDirectory(prefix=".import-", dir=folder) as place:
            for file, data in ((name, kernels[name]), (f"{name}.sha256", digest)):
                write_file(Path(place) / file, data)
                os.replace(Path(place) / file, folder / file)
    return new


def install_device_kernels(cache: CompileCache, kernels: Iterable[Kernel]) -> dict[str, int]:
    """Put GPU kernels into the cache: of each kind, how many were not there. Raises OSError where
    nothing can be written.
    """
    new = [kernel.kind for kernel in kernels if store_kernel(cache.root, kernel)]
    return {kind: new.count(kind) for kind in KINDS if kind in new}


def _device_kernels(root: Path, environment: str) -> dict[str, bytes]:
    """The members that are an environment's kernels. One that is damaged stays behind."""
    members: dict[str, bytes] = {}
    for folder in folders_of(root, environment):
        try:
            kernel = read_kernel(folder)
        except Damaged as error:
            logger.warning("compiled kernel %s is left out: %s", folder.name, error)
            continue
        members |= {f"{kernel.place}/{name}": data for name, data in kernel.files.items()}
    return members


def _kernel(kernel: Kernel, environments: Collection[str]) -> Kernel:
    try:
        check_kernel(kernel)
        if kernel.environment not in environments:
            raise Damaged("it is for the environment of no entry here")
    except Damaged as error:
        raise ArchiveError(f"{kernel.place}: {error}") from error
    return kernel


def _packed_entry(name: str, files: dict[str, bytes]) -> PackedEntry:
    for needed in (MANIFEST, READY):
        if needed not in files:
            raise ArchiveError(f"{VERSION}/{name}/{needed} is missing")
    data, ready, tuning = files.pop(MANIFEST), files.pop(READY), files.pop(TUNING, None)
    try:
        manifest = parse_manifest(data, ready)
        check_whole(manifest)
        if name.rpartition("-")[2] != digest_of(manifest.facts):
            raise Damaged("its facts are not those of its name")
        if odd := files.keys() ^ manifest.files.keys():
            raise Damaged(f"{min(odd)!r:.100} is not both in the manifest and in the archive")
        for file, content in files.items():
            check_file(manifest, file, content)
    except Damaged as error:
        raise ArchiveError(f"{VERSION}/{name}: {error}") from error
    return PackedEntry(name, manifest, files, tuning)


def _fill(folder: Path, packed: PackedEntry) -> Contents:
    for name, data in packed.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return packed.manifest.contents


def _kernel_name() -> str | None:
    """What the CPU kernels for this machine are called, if there are any for it."""
    try:
        return native.file_name()
    except native.BuildError:
        return None
