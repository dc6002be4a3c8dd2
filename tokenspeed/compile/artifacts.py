"""Artifacts of Inductor out of a cache entry: what `calls.py` cannot keep.

What is loaded are the bytes that were checked, from a private copy: the entry itself is never
written, so it may be read-only, or in use by others. Importing this file imports Inductor
(seconds).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.compile import inductor_api
from tokenspeed.compile.entry import OBJECTS, Entry
from tokenspeed.compile.inductor_api import VectorIsa
from tokenspeed.compile.locks import read_lock
from tokenspeed.compile.plan import Piece
from tokenspeed.log import logger

COMPILER_ERRORS = inductor_api.COMPILER_ERRORS


def load_artifacts(entry: Entry) -> dict[str, Piece]:
    """The functions of an entry's artifacts, by their files. Raises whatever goes wrong."""
    contents = entry.manifest.contents
    began = time.monotonic()
    isa = None if contents.isa is None else msgspec.convert(contents.isa, VectorIsa)
    folder = _Folder(_private_folder(entry.folder.parent, entry))
    try:
        before = _num_objects(folder.path)
        with inductor_api.loading_from(folder.path, isa):
            pieces = {
                file: _returning_tuple(inductor_api.load(entry.files[file]), folder)
                for file in entry.artifacts
            }
        if made := _num_objects(folder.path) - before:
            logger.info(
                "%d objects were compiled for this installation in %.1f s",
                *(made, time.monotonic() - began),
            )
    finally:
        # What was mapped stays; on CUDA kernels are read when they are first launched.
        if entry.manifest.facts["compile"]["device"] == "cpu":
            folder.remove()
    return pieces


class _Folder:
    """A private folder and its read lock, until `remove`: at the latest when nothing refers to this
    any more, or the process ends.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.remove = weakref.finalize(self, _remove, path, read_lock(path))


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _returning_tuple(function: Callable[..., Sequence[Any]], folder: _Folder) -> Piece:
    """The function as a piece, which keeps the folder that its kernels are read from."""

    def piece(*args: Any, _folder: _Folder = folder) -> tuple[Any, ...]:
        return tuple(function(*args))

    return piece


def _private_folder(beside: Path, entry: Entry) -> Path:
    """A new folder with the entry's objects, beside it if possible: programs may be loaded from
    there, which temporary folders do not always allow.
    """
    try:
        return _filled(Path(tempfile.mkdtemp(prefix=".load-", dir=beside)), entry)
    except OSError:  # read-only, or full
        return _filled(Path(tempfile.mkdtemp(prefix="tokenspeed-")), entry)


def _filled(folder: Path, entry: Entry) -> Path:
    """The folder with the entry's objects; it is removed if they do not fit."""
    try:
        for name, data in entry.files.items():
            if name.split("/")[0] in OBJECTS:
                path = folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder


def _num_objects(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.so"))
