"""Where Triton and FlashInfer of this process find compiled kernels, and leave new ones.

    HOME/triton/KEY/        as Triton's own cache has it: files, and groups of their absolute paths
    HOME/builds/NAME/       NAME.so, as FlashInfer looks for builds that come with it
    HOME/workspace/         what FlashInfer builds

A home is a private copy of what is kept for this environment (`kernel_store.py`), of bytes that
were checked: nothing else that somebody may write is loaded, two processes never meet in it, and
what a killed one leaves is swept a day later. What is new in it is kept when `keep`
is called, and when the process ends.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tokenspeed.compile.cache import VERSION, CompileCache
from tokenspeed.compile.entry import Damaged
from tokenspeed.compile.kernel_store import (
    BUILD,
    FLASHINFER,
    NAME,
    TRITON,
    Kernel,
    build_key,
    folders_of,
    module_or_kernel,
    read_kernel,
    set_aside,
    store_kernel,
    thin,
)
from tokenspeed.compile.locks import read_lock
from tokenspeed.compile.trust import Untrusted, own_folder
from tokenspeed.log import logger

PREFIX = ".load-kernels-"
"""Of homes that lie in the cache folder."""


class KernelHome:
    """One process's home. Raises OSError where there can be none."""

    def __init__(self, root: Path, environment: str) -> None:
        self._root, self._environment = root, environment
        self._kept: set[str] = set()
        self._owner = os.getpid()
        self._is_open = True
        self._folder = _private_folder(root)
        self._lock = read_lock(self._folder)
        self.triton = self._folder / TRITON
        self.builds = self._folder / "builds"
        self.workspace = self._folder / "workspace"
        try:
            for folder in (self.triton, self.builds, self.workspace):
                folder.mkdir(mode=0o700)
            self._fill()
        except OSError:
            self._remove()
            raise
        atexit.register(self.close)

    @property
    def num_kept(self) -> int:
        """Kernels that need not be compiled again."""
        return len(self._kept)

    def keep(self) -> list[str]:
        """Keep the kernels that are new here; their places. Never raises: without them the next
        start compiles again.
        """
        new = []
        try:
            for kernel in self._found():
                try:
                    if store_kernel(self._root, kernel):
                        new.append(kernel.place)
                except Damaged as error:
                    logger.debug("kernel %s is not kept: %s", kernel.key, error)
                self._kept.add(kernel.key)
            for kind in {place.split("/")[0] for place in new}:
                thin(self._root / kind / self._environment)
        except OSError as error:
            logger.info("compiled kernels are not kept: %s", error)
        return new

    def leave_out(self) -> None:
        """Keep none of the kernels that are here now and are not kept; their modules are, which
        other kernels share.
        """
        for folder in self.triton.iterdir():
            if any(folder.glob("__grp__*.json")):
                self._kept.add(folder.name)

    def close(self) -> None:
        """Keep what is new, and remove the home. What was loaded stays loaded. A process that was
        forked leaves that to the one that the home belongs to.
        """
        if self._is_open and self._owner == os.getpid():
            self._is_open = False
            self.keep()
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _fill(self) -> None:
        for folder in _trusted_folders(self._root, self._environment):
            try:
                kernel = read_kernel(folder)
            except Damaged as error:
                logger.warning("compiled kernel %s is set aside: %s", folder.name, error)
                set_aside(folder)
                continue
            except OSError as error:
                logger.warning("compiled kernel %s is left out: %s", folder.name, error)
                continue
            self._kept.add(kernel.key)
            if kernel.kind == TRITON:
                _put_triton(self.triton / kernel.key, kernel)
            else:
                _put_build(self.builds / kernel.files[NAME].decode(), kernel)

    def _found(self) -> Iterator[Kernel]:
        """What lies here and is not known to be kept."""
        for folder in sorted(self.triton.iterdir()):
            if folder.name not in self._kept and (files := _triton_files(folder)):
                yield Kernel(TRITON, self._environment, folder.name, files)
        for path in sorted(self.workspace.glob(".cache/flashinfer/*/cached_ops/*/*.so")):
            key, name = build_key(path.stem), path.stem
            if key not in self._kept and name == path.parent.name:
                files = {NAME: name.encode(), BUILD: path.read_bytes()}
                yield Kernel(FLASHINFER, self._environment, key, files)


def _trusted_folders(root: Path, environment: str) -> list[Path]:
    try:
        return list(folders_of(root, environment))
    except Untrusted as error:
        logger.warning("compiled kernels are left out: %s", error)
        return []


def _private_folder(root: Path) -> Path:
    """In the cache folder if possible: objects may be loaded from there, which temporary folders do
    not always allow.
    """
    try:
        own_folder(root)
        own_folder(root / VERSION)
        CompileCache(
            root
        ).sweep()  # homes of killed processes: a start that finds all stores nothing
        return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root / VERSION))
    except OSError:
        return Path(tempfile.mkdtemp(prefix="tokenspeed-kernels-"))


def _put_triton(folder: Path, kernel: Kernel) -> None:
    """Lay a kernel out as Triton's FileCacheManager (3.4 to 3.6) does."""
    folder.mkdir(mode=0o700)
    for file, data in kernel.files.items():
        (folder / file).write_bytes(data)
    if name := module_or_kernel(kernel.files):  # a module has none
        paths = {file: str(folder / file) for file in kernel.files}
        (folder / f"__grp__{name}.json").write_text(json.dumps({"child_paths": paths}))


def _put_build(folder: Path, kernel: Kernel) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"{folder.name}.so").write_bytes(kernel.files[BUILD])


def _triton_files(folder: Path) -> dict[str, bytes]:
    """What is worth keeping of a folder of Triton's cache: a kernel's metadata and binary without
    its intermediate code, or a module. Empty while neither is finished: the group comes last.
    """
    for group in folder.glob("__grp__*.json"):
        name = group.name.removeprefix("__grp__").removesuffix(".json")
        paths = [folder / f"{name}.json", folder / f"{name}.cubin"]
        if all(path.is_file() for path in paths):
            return {path.name: path.read_bytes() for path in paths}
    return {path.name: path.read_bytes() for path in folder.glob("*.so") if path.is_file()}
