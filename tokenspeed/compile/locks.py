"""Locks between processes: who makes an entry, and which folders are still read.

A lock ends with its process, however that ends. A lock file is removed by who holds it; so who gets
one looks whether it is still the file of that name, and else takes the new one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

_POLL_S = 0.2
_MAX_WAIT_S = 1800.0


@contextlib.contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[bool]:
    """Hold a lock file; `waiting` is called now and again while another process does. Where locks
    do not work, or one is held for too long, go on without (False).
    """
    descriptor = _wait_for(path, waiting)
    try:
        yield descriptor is not None
    finally:
        if descriptor is not None:
            release(path, descriptor)


def try_lock(path: Path) -> int | None:
    """Take a lock file, for `release` to give back; None while another process holds it. Raises
    OSError where locks do not work.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file(path, descriptor):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def release(path: Path, descriptor: int) -> None:
    """Give a lock back, and remove its file while nobody else can have it."""
    with contextlib.suppress(OSError):
        os.unlink(path)
    os.close(descriptor)


def read_lock(folder: Path) -> int | None:
    """Let `is_read` be true of a folder until what is returned is closed: at the latest when this
    process ends. None where locks do not work.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return descriptor
    except OSError:
        os.close(descriptor)
        return None


def is_read(folder: Path) -> bool:
    """Does a process hold the folder's read lock, for all that is known?"""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def _wait_for(path: Path, waiting: Callable[[], None]) -> int | None:
    end = time.monotonic() + _MAX_WAIT_S
    while time.monotonic() < end:
        try:
            descriptor = try_lock(path)
        except OSError:
            break
        if descriptor is not None:
            return descriptor
        waiting()
        time.sleep(_POLL_S)
    return None


def _is_file(path: Path, descriptor: int) -> bool:
    try:
        there, here = os.lstat(path), os.fstat(descriptor)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)
