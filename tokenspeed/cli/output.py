"""Standard output that may be lost at any word: a disk that is full, a reader that has gone.

What is printed anywhere in a command passes here, so that its loss is told in one place, whatever
the command would make of an OSError of its own.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class OutputLost(Exception):
    """The message is one line that says why. `by_reader`: who read it (head, less) has gone."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"cannot write standard output: {error.strerror or error}")
        self.by_reader = isinstance(error, BrokenPipeError)


@contextlib.contextmanager
def watched_stdout() -> Iterator[None]:
    """Have all of it written when the context ends. Raises OutputLost, there or from `print`."""
    stream = sys.stdout
    if stream is None:  # it was closed before the start
        yield
        return
    watched = _Watched(stream)
    sys.stdout = cast(TextIO, watched)
    try:
        yield
    finally:
        sys.stdout = stream
        watched.flush()


class _Watched:
    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._write_nowhere()
            raise OutputLost(error) from None

    def _write_nowhere(self) -> None:
        """The interpreter flushes once more at its end, and would complain."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._stream.fileno())
        os.close(nowhere)
