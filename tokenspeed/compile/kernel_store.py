"""Compiled GPU kernels that belong to no entry: those written by hand, and FlashInfer's.

    ROOT/triton/ENVIRONMENT/KEY/      under Triton's own key: either a kernel,
        NAME.json, NAME.cubin         or a module of its driver or of a launcher,
        MODULE.so
    ROOT/flashinfer/ENVIRONMENT/ID/   a build of FlashInfer; ID is a digest of its long name
        name, kernel.so
    .../SHA256SUMS                    of the files of each folder, as sha256sum writes it

They are code, so they are believed as entries are (`trust.py`), each by its digests. A folder
appears whole, by one rename, and is never written again. Nothing in it depends on where it lies:
of what Triton keeps, the group files name absolute paths, and are made anew where they are needed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokenspeed.compile.entry import Damaged
from tokenspeed.compile.facts import Facts, digest_of
from tokenspeed.compile.trust import NoFile, check_folder, own_folder, read_own_file

TRITON, FLASHINFER = KINDS = ("triton", "flashinfer")
"""The folders, beside that of the entries, and what they are for."""

SUMS, NAME, BUILD = "SHA256SUMS", "name", "kernel.so"

MAX_KEPT = 512
"""Kernels of a kind and environment that stay: those made last. Each edit of a source, each model
and each tile makes others.
"""

ENVIRONMENT = ("versions", "machine", "settings")
_MAX_SUMS = 1 << 16
_STALE_S = 86400.0
_ENVIRONMENT_NAME = re.compile(r"[0-9a-f]{16}")
_KEYS = {TRITON: re.compile(r"[A-Z2-7]{52}"), FLASHINFER: re.compile(r"[0-9a-f]{16}")}
_METADATA = re.compile(r"([A-Za-z_]\w{0,89})\.json", re.ASCII)
_MODULE = re.compile(r"[A-Za-z_]\w{0,39}\.[a-z][A-Za-z0-9_-]{0,49}\.so", re.ASCII)
_BUILD_NAME = re.compile(r"[A-Za-z_]\w{0,249}", re.ASCII)
_SUM = re.compile(r"([0-9a-f]{64})  ([\w.-]+)", re.ASCII)
_ELF = b"\x7fELF"
"""What a cubin begins with, as well as a shared object."""


@dataclass(frozen=True)
class Kernel:
    """One folder: its kind, its environment's digest, its key, and its files without their sums."""

    kind: str
    environment: str
    key: str
    files: Mapping[str, bytes]

    @property
    def place(self) -> str:
        return f"{self.kind}/{self.environment}/{self.key}"


def environment_of(facts: Facts) -> str:
    """What kernels are kept for: versions, machine and settings, of all the facts of an entry."""
    return digest_of({name: facts.get(name) for name in ENVIRONMENT})


def build_key(name: str) -> str:
    """The key of FlashInfer's build of this name, which is too long for some file systems."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def module_or_kernel(files: Mapping[str, bytes]) -> str | None:
    """The name of the one kernel of Triton that these files are, "" for a module; else None."""
    if len(files) == 1 and _MODULE.fullmatch(min(files)):
        return ""
    found = [matched[1] for name in files if (matched := _METADATA.fullmatch(name))]
    is_kernel = len(found) == 1 and files.keys() == {f"{found[0]}.json", f"{found[0]}.cubin"}
    return found[0] if is_kernel else None


def check_kernel(kernel: Kernel) -> None:
    """Raise Damaged for what cannot lie in the store, under its key and with its files."""
    files, known = kernel.files, _KEYS.get(kernel.kind)
    is_placed = known is not None and known.fullmatch(kernel.key)
    if not (is_placed and _ENVIRONMENT_NAME.fullmatch(kernel.environment)):
        raise Damaged("no kernel is called so")
    if kernel.kind == TRITON:
        name = module_or_kernel(files)
        if name is None:
            raise Damaged(f"{min(files, default='nothing')!r:.100} is not all of one kernel")
        if name:
            _check_metadata(files[f"{name}.json"])
    else:
        if files.keys() != {NAME, BUILD}:
            raise Damaged(f"a build has the files {NAME} and {BUILD}")
        name = files[NAME].decode(errors="replace")
        if not _BUILD_NAME.fullmatch(name) or build_key(name) != kernel.key:
            raise Damaged(f"the build of {name!r:.100} is not called so")
    for file, data in files.items():
        if file.endswith((".so", ".cubin")) and not data.startswith(_ELF):
            raise Damaged(f"{file} is no object")


def environments(root: Path) -> list[Path]:
    """The folders that hold kernels, of each kind and environment. Raises Untrusted where others
    may write.
    """
    found = []
    for kind in KINDS:
        folder = root / kind
        if folder.is_dir():
            check_folder(root)
            check_folder(folder)
            found += [at for at in sorted(folder.iterdir()) if _ENVIRONMENT_NAME.fullmatch(at.name)]
    return [folder for folder in found if folder.is_dir() and not folder.is_symlink()]


def kernel_folders(folder: Path) -> list[Path]:
    """The folders of the kernels of one of `environments`. Raises OSError."""
    check_folder(folder)
    key = _KEYS[folder.parent.name]
    named = [path for path in sorted(folder.iterdir()) if key.fullmatch(path.name)]
    return [path for path in named if path.is_dir() and not path.is_symlink()]


def folders_of(root: Path, environment: str) -> Iterator[Path]:
    """The folders of all kernels of an environment. Raises OSError."""
    for folder in environments(root):
        if folder.name == environment:
            yield from kernel_folders(folder)


def read_kernel(folder: Path) -> Kernel:
    """Read and check a kernel. Raises Damaged, or OSError for what cannot be read or trusted."""
    check_folder(folder)
    try:
        sums = _parsed(read_own_file(folder / SUMS, _MAX_SUMS))
        files = {name: read_own_file(folder / name) for name in sums}
    except (FileNotFoundError, NoFile) as error:
        raise Damaged(f"{Path(str(error.filename or SUMS)).name} is gone, or no file") from error
    for name, data in files.items():
        if hashlib.sha256(data).hexdigest() != sums[name]:
            raise Damaged(f"{name} is not what was written")
    kernel = Kernel(folder.parent.parent.name, folder.parent.name, folder.name, files)
    check_kernel(kernel)
    return kernel


def store_kernel(root: Path, kernel: Kernel) -> bool:
    """Keep a kernel; False if it is there, and stays as it is. Raises Damaged for one that cannot
    be kept, and OSError where nothing can be written.
    """
    check_kernel(kernel)
    place = root / kernel.place
    for folder in (root, *reversed(place.parents[:2])):
        own_folder(folder)
    if place.is_dir():
        return False
    sums = "".join(
        f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in _sorted(kernel)
    )
    build = Path(tempfile.mkdtemp(prefix=".keep-", dir=place.parent))
    try:
        for name, data in (*_sorted(kernel), (SUMS, sums.encode())):
            (build / name).write_bytes(data)  # not synced: what a crash cuts short is damaged
            (build / name).chmod(0o600)
        os.rename(build, place)
    except OSError:
        shutil.rmtree(build, ignore_errors=True)
        if not place.is_dir():
            raise
        return False
    return True


def thin(folder: Path) -> None:
    """Of an environment's kernels keep those made last, and nothing that a process which was killed
    has left, or that was set aside long ago.
    """
    with contextlib.suppress(OSError):
        for path in sorted(kernel_folders(folder), key=_made)[:-MAX_KEPT]:
            remove_folder(path)
        for path in folder.glob(".*"):
            if time.time() - path.lstat().st_mtime > _STALE_S and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)


def set_aside(folder: Path) -> Path | None:
    """Move a folder out of the way in one step: where it went, or None if it cannot be moved."""
    aside = folder.with_name(f".aside-{folder.name}-{time.time_ns():x}")
    try:
        os.utime(folder, follow_symlinks=False)  # it is kept for a day from now on
        os.rename(folder, aside)
    except OSError:
        return None
    return aside


def remove_folder(folder: Path) -> None:
    """Remove a kernel, or an environment with all of its kernels. Whoever looks for it finds it
    whole or not at all. Raises OSError.
    """
    aside = set_aside(folder)
    if aside is None:
        raise OSError(f"{folder} cannot be moved")
    shutil.rmtree(aside)


def _check_metadata(data: bytes) -> None:
    try:
        is_whole = isinstance(msgspec.json.decode(data, type=dict[str, object])["name"], str)
    except (msgspec.DecodeError, RecursionError, KeyError):
        is_whole = False
    if not is_whole:
        raise Damaged("its metadata cannot be read")


def _parsed(data: bytes) -> dict[str, str]:
    lines = data.decode(errors="replace").splitlines()
    found = [_SUM.fullmatch(line) for line in lines]
    sums = {matched[2]: matched[1] for matched in found if matched}
    if len(sums) != len(lines) or not sums or not all(map(_is_plain, sums)):
        raise Damaged(f"{SUMS} cannot be read")
    return sums


def _is_plain(name: str) -> bool:
    return not name.startswith((".", "-"))


def _sorted(kernel: Kernel) -> list[tuple[str, bytes]]:
    return sorted(kernel.files.items())


def _made(folder: Path) -> float:
    return folder.lstat().st_mtime
