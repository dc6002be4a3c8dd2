"""A program out of a cache entry: bytes and a plan. Nothing is captured and nothing compiled."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tokenspeed.compile import inductor_api, plan
from tokenspeed.compile.entry import OBJECTS, PLAN, Damaged, Entry, StoredPiece, Unloadable
from tokenspeed.compile.inductor_api import VectorIsa
from tokenspeed.compile.locks import read_lock
from tokenspeed.compile.plan import Piece, Program
from tokenspeed.compile.ranges import by_tokens
from tokenspeed.log import logger
from tokenspeed.passes.rewrite import TokenRange
from tokenspeed.spans import span

_NOT_ITS_FAULT = (
    *(OSError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError),
    *inductor_api.COMPILER_ERRORS,
)
"""Errors that say nothing about an entry, whose every byte has been checked by then."""


def load_program(entry: Entry) -> Program:
    """Load an entry's pieces. Raises Damaged where they prove to be bad, Unloadable where this
    machine fails.

    What is loaded are the bytes that were checked, from a private copy: the entry itself is never
    written, so it may be read-only, or in use by others.
    """
    with span("compile.cache_load"):
        try:
            return _load(entry)
        except Exception as error:
            reason = f"its pieces cannot be loaded: {type(error).__name__}: {error}"
            is_here = any(isinstance(each, _NOT_ITS_FAULT) for each in _causes(error))
            kind = Unloadable if is_here else Damaged
            raise kind(reason.splitlines()[0][:300]) from error


def _load(entry: Entry) -> Program:
    contents = entry.manifest.contents
    began = time.monotonic()
    isa = None if contents.isa is None else msgspec.convert(contents.isa, VectorIsa)
    program_plan = plan.decode(entry.files[PLAN].decode())
    folder = _Folder(_private_folder(entry.folder.parent, entry))
    try:
        before = _num_objects(folder.path)
        with inductor_api.loading_from(folder.path, isa):
            pieces = {key: _piece(entry, each, folder) for key, each in contents.pieces.items()}
        if made := _num_objects(folder.path) - before:
            logger.info(
                "%d objects were compiled for this installation in %.1f s",
                *(made, time.monotonic() - began),
            )
    finally:
        # What was mapped stays; on CUDA kernels are read when they are first launched.
        if entry.manifest.facts["compile"]["device"] == "cpu":
            folder.remove()
    if missing := program_plan.piece_hashes() - pieces.keys():
        raise Damaged(f"the plan names the piece {min(missing)}, which is not there")
    return Program(program_plan, pieces)


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


def _piece(entry: Entry, stored: StoredPiece, folder: _Folder) -> Piece:
    by_range = {
        TokenRange(first, last): _returning_tuple(inductor_api.load(entry.files[file]), folder)
        for first, last, file in stored.files
    }
    return by_tokens(by_range, stored.tokens)


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


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error, and those that it came of."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _num_objects(folder: Path) -> int:
    return sum(1 for _ in folder.rglob("*.so"))
