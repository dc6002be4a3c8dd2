"""The two files of a batch: requests read a line at a time, answers appended a line at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO

import msgspec
from msgspec import UNSET, UnsetType

from tokenspeed.wording import counted

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
    """A line of output. `line` is the number of an input line that has no custom_id of its own."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None
    line: int | UnsetType = UNSET

    @property
    def key(self) -> str | int | None:
        """The custom_id or line number that this line answers; None if it cannot be told."""
        if self.custom_id is not None:
            return self.custom_id
        return None if self.line is UNSET else self.line

    @property
    def failed(self) -> bool:
        return self.response is None or self.response.status_code != 200


def read_lines(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes | None]]:
    """Numbered lines (from 1) that are not blank; None for one longer than `max_bytes`."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes and not line.endswith(b"\n"):
            while (rest := file.readline(1 << 20)) and not rest.endswith(b"\n"):
                pass
            yield number, None
        elif line.strip():
            yield number, line


def count_lines(file: BinaryIO) -> int:
    """Lines from here on that are not blank; the file is left where it is."""
    here = file.tell()
    blocks = iter(lambda: file.readline(1 << 20), b"")
    num_lines, has_text = 0, False
    for block in blocks:
        has_text |= bool(block.strip())
        if block.endswith(b"\n"):
            num_lines, has_text = num_lines + has_text, False
    file.seek(here)
    return num_lines + has_text


def open_input(path: str) -> contextlib.AbstractContextManager[BinaryIO]:
    """Raises BatchFileError."""
    if path == STANDARD:
        return contextlib.nullcontext(sys.stdin.buffer)
    try:
        return open(path, "rb")
    except OSError as error:
        raise BatchFileError(f"cannot read {path}: {error.strerror or error}") from None


class BatchOutput:
    """The output, held by one run at a time. `done` has the keys in it: whether each one failed.

    A torn last line, which a run that was killed may leave, is dropped. A line that cannot be
    written whole (a full disk) is taken back before the error is raised. Stdout, pipes and devices
    are only written to: there is nothing to take up, and nothing to take back.
    """

    def __init__(self, path: str) -> None:
        """Raises BatchFileError."""
        self.done: dict[str | int, bool] = {}
        self.num_answers = 0
        self._path = path
        self._name = "standard output" if path == STANDARD else path
        self._is_file = False
        if path == STANDARD:
            sys.stdout.flush()
            self._fd = os.dup(sys.stdout.fileno())
            return
        try:
            # A pipe opened for reading too would never tell that its reader is gone.
            access = os.O_WRONLY if _is_stream(path) else os.O_RDWR
            self._fd = os.open(path, access | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._write_error(error) from None
        self._is_file = stat.S_ISREG(os.fstat(self._fd).st_mode)
        if self._is_file:
            try:
                self._lock()
                self._resume()
            except BaseException:
                os.close(self._fd)
                raise

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def how_to_go_on(self) -> str:
        """What a run that was stopped leaves, and what the next one makes of it."""
        if not self._is_file:
            return f"the next run begins anew: {self._name} cannot be read again"
        kept = counted(self.num_answers, "answer")
        return f"{self._path} keeps {kept}; the same command goes on from there"

    def append(self, line: BatchLine) -> None:
        """Raises BatchFileError."""
        data = msgspec.json.encode(line) + b"\n"
        size = os.fstat(self._fd).st_size
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        except OSError as error:
            if self._is_file:
                os.ftruncate(self._fd, size)
            raise self._write_error(error) from None
        self.num_answers += 1

    def _write_error(self, error: OSError) -> BatchFileError:
        return BatchFileError(f"cannot write {self._name}: {error.strerror or error}")

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BatchFileError(
                f"{self._path} is being written by another run; wait for it"
            ) from None

    def _resume(self) -> None:
        whole = 0
        with open(self._path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                try:
                    # Requests have no `id`, so an input file is not taken for an output.
                    answer = msgspec.json.decode(line, type=BatchLine)
                except (msgspec.MsgspecError, RecursionError):
                    raise BatchFileError(
                        f"{self._path} holds something else than batch answers; name another output"
                    ) from None
                self.num_answers += 1
                if answer.key is not None:
                    self.done[answer.key] = answer.failed
        os.ftruncate(self._fd, whole)


def _is_stream(path: str) -> bool:
    """Whether the path leads to something that exists and is no regular file."""
    try:
        return not stat.S_ISREG(os.stat(path).st_mode)
    except FileNotFoundError:
        return False
