"""The two files of a batch: requests read a line at a time, answers appended a line at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

STANDARD = "-"
"""The name of stdin and of stdout."""


class BatchFileError(ValueError):
    """A file that cannot be used: one line that says what, why, and what to do."""


class BatchError(msgspec.Struct, frozen=True):
    code: str
    message: str


class BatchResponse(msgspec.Struct, frozen=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchLine(msgspec.Struct, frozen=True, kw_only=True):
    """A line of output. `line` is the number of an input line that has no usable custom_id."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None
    line: int | UnsetType = UNSET


class _Key(msgspec.Struct, frozen=True):
    """What a line of output is known by. Input lines have no `id`, so they are not taken for it."""

    id: str
    custom_id: str | None
    line: int | None = None


def read_lines(path: str, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines (from 1) that are not blank; None for one longer than `max_bytes`."""
    with _open_input(path) as file:
        number = 0
        while line := file.readline(max_bytes + 1):
            number += 1
            if len(line) > max_bytes and not line.endswith(b"\n"):
                while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                    pass
                yield number, None
            elif line.strip():
                yield number, line


def _open_input(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    if path == STANDARD:
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror or error}") from None


class BatchOutput:
    """The output file, held by one run at a time. `done` are the ids (or line numbers) in it.

    A torn last line, which a run that was killed may leave, is dropped. A line that cannot be
    written whole (a full disk) is taken back before the error is raised.
    """

    def __init__(self, path: str) -> None:
        self.done: set[str | int] = set()
        self._is_file = path != STANDARD
        if not self._is_file:
            sys.stdout.flush()
            self._fd = os.dup(sys.stdout.fileno())
            return
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise BatchFileError(f"cannot write {path}: {error.strerror or error}") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise BatchFileError(f"{path} is being written by another run; wait for it") from None
        self._resume(path)

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def append(self, line: BatchLine) -> None:
        data = msgspec.json.encode(line) + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError:
            if self._is_file:
                os.ftruncate(self._fd, size)
            raise

    def _resume(self, path: str) -> None:
        whole = 0
        with open(path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    key = msgspec.json.decode(line, type=_Key)
                except (msgspec.MsgspecError, RecursionError):
                    raise BatchFileError(
                        f"{path} holds something else than batch answers; name another output"
                    ) from None
                found = key.line if key.custom_id is None else key.custom_id
                if found is not None:
                    self.done.add(found)
        os.ftruncate(self._fd, whole)
