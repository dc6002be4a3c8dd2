"""Files that only this user can have written: the rest of the cache is no better than they are.

Artifacts are code. So they are read only from folders and files that belong to this user, that
nobody else may write, and that are no links; and each file is checked in the moment it is open.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

MAX_BYTES = 1 << 30
_SHARED = stat.S_IWGRP | stat.S_IWOTH


class Untrusted(OSError):
    """A file or folder that somebody else may have written; the message is one line."""


class NoFile(OSError):
    """A folder, a link or a pipe in the place of a file; the message is one line."""


def check_folder(folder: Path) -> None:
    """Raise Untrusted unless `folder` is a folder of this user that nobody else may write."""
    facts = os.lstat(folder)
    if not stat.S_ISDIR(facts.st_mode):
        raise Untrusted(f"{folder} is not a folder")
    _check(folder, facts)


def own_folder(folder: Path) -> None:
    """Make a folder that only this user may use, where there is none. Raises Untrusted for one that
    somebody else may write, and OSError.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700, parents=True)
    check_folder(folder)


def read_own_file(path: Path, limit: int = MAX_BYTES) -> bytes:
    """The contents of a file of this user that nobody else may write. Raises OSError."""
    descriptor = _open(path)
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise NoFile(f"{path} is not a file")
        _check(path, facts)
        if facts.st_size > limit:
            raise Untrusted(f"{path} has {facts.st_size} bytes, more than it may")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(limit)
    finally:
        os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NoFile(f"{path} is a link") from error
        raise


def _check(path: Path, facts: os.stat_result) -> None:
    if facts.st_uid != os.geteuid():
        raise Untrusted(f"{path} belongs to user {facts.st_uid}, not to {os.geteuid()}")
    if facts.st_mode & _SHARED:
        mode = stat.S_IMODE(facts.st_mode)
        raise Untrusted(f"others may write {path} (mode {mode:o}; chmod go-w helps)")


def write_file(path: Path, data: bytes) -> None:
    """Write a new file that only this user can read, through to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make names in a folder as durable as the files they stand for."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
