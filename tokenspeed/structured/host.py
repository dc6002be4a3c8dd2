"""The server's side of the processes of grammars: start the zygote, have others forked."""

from __future__ import annotations

import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.connection import Connection
from threading import Thread

import msgspec

from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.orders import (
    HEADER_BYTES,
    ROWS,
    Job,
    Kill,
    Open,
    Slow,
    ToZygote,
    Vocabulary,
    num_words,
)
from tokenspeed.text.errors import ModelError
from tokenspeed.text.tokenizer import Tokenizer

ZYGOTE = "tokenspeed.structured.zygote"
_RESTART_S = 2.0
_NO_PROCESS = "grammars cannot be compiled now: no process for them can be started"
_QUIET = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""No threads of libraries: none survives a fork."""


@dataclass(frozen=True)
class Link:
    """To the process of one grammar."""

    number: int
    connection: Connection
    board: mmap.mmap
    mask_bytes: int

    @property
    def num_done(self) -> int:
        return int.from_bytes(self.board[:4], sys.byteorder)

    def mask(self, row: int) -> bytes:
        start = HEADER_BYTES + row * self.mask_bytes
        return self.board[start : start + self.mask_bytes]

    def close(self) -> None:
        self.connection.close()
        self.board.close()


@dataclass(frozen=True)
class _Zygote:
    process: subprocess.Popen[bytes]
    control: socket.socket
    mask_bytes: int


class GrammarHost:
    """`vocabulary` is called once, in a thread, for the first grammar; it may raise InvalidRequest
    or ModelError. All else belongs to one thread.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = vocabulary
        self._numbers = itertools.count()
        self._zygote: Future[_Zygote] | None = None
        self._started_at = 0.0

    def open(self, job: Job) -> Link | None:
        """A process for `job`; None while there can be none yet. Raises InvalidRequest where there
        can be none at all.
        """
        if self._zygote is None:
            self._start()
            return None
        if not self._zygote.done():
            return None
        try:
            zygote = self._zygote.result()
        except (InvalidRequest, ModelError) as error:
            raise InvalidRequest(str(error)) from None
        except Exception as error:
            self._zygote = None
            logger.error("the process of grammars cannot be started", exc_info=error)
            raise InvalidRequest(_NO_PROCESS) from None
        try:
            return self._open(zygote, msgspec.msgpack.encode(job))
        except OSError as error:
            logger.error("no process for a grammar can be started", exc_info=error)
            raise InvalidRequest(_NO_PROCESS) from None

    def _open(self, zygote: _Zygote, job: bytes) -> Link | None:
        number, (ours, theirs) = next(self._numbers), socket.socketpair()
        board_bytes = HEADER_BYTES + ROWS * zygote.mask_bytes
        with (
            ours,
            theirs,
            open_memory("job", job) as job_file,
            open_memory("board", board_bytes) as board_file,
        ):
            board = mmap.mmap(board_file, board_bytes)
            if not self._send(Open(number), [theirs.fileno(), job_file, board_file]):
                return None
            return Link(number, Connection(ours.detach()), board, zygote.mask_bytes)

    def kill(self, link: Link) -> None:
        """End a process, whatever it does."""
        link.close()
        self._send(Kill(link.number))

    def slow(self, link: Link) -> None:
        """Let others go first from now on."""
        self._send(Slow(link.number))

    def close(self) -> None:
        """End all processes. May be called again."""
        zygote, self._zygote = self._zygote, None
        if zygote is not None and not zygote.exception():
            _end(zygote.result())

    def _send(self, order: ToZygote, files: list[int] | None = None) -> bool:
        if self._zygote is None or not self._zygote.done():
            return False
        try:
            control = self._zygote.result().control
            socket.send_fds(control, [msgspec.msgpack.encode(order)], files or [])
        except OSError:
            logger.warning("the process of grammars is gone; another one is started")
            self.close()
            return False
        return True

    def _start(self) -> None:
        if time.monotonic() - self._started_at < _RESTART_S:
            return
        self._started_at = time.monotonic()
        future = self._zygote = Future()

        def run() -> None:
            try:
                zygote = _spawn(self._vocabulary())
            except BaseException as error:
                future.set_exception(error)
                return
            weakref.finalize(self, _end, zygote)
            future.set_result(zygote)

        Thread(target=run, name="start-grammars", daemon=True).start()


def vocabulary_of(
    tokenizer: Tokenizer | None, vocab_size: int, eos_ids: frozenset[int]
) -> Vocabulary:
    """Raises InvalidRequest where there is no tokenizer."""
    if tokenizer is None:
        raise InvalidRequest("structured output needs a tokenizer, but skip_tokenizer_init is set")
    return Vocabulary(
        tokenizer=tokenizer.to_json(),
        special_tokens=tokenizer.special_tokens,
        vocab_size=vocab_size,
        eos_ids=sorted(eos_ids),
    )


def _spawn(vocabulary: Vocabulary) -> _Zygote:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with open_memory("vocabulary", msgspec.msgpack.encode(vocabulary)) as file, theirs:
        files = [theirs.fileno(), file]
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", ZYGOTE, *map(str, files)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=files,
            env=os.environ | _QUIET,
        )
    return _Zygote(process, ours, 4 * num_words(vocabulary.vocab_size))


def _end(zygote: _Zygote) -> None:
    """It ends its children, which takes no time."""
    zygote.control.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        zygote.process.wait(2.0)
        return
    zygote.process.kill()
    zygote.process.wait()


@contextlib.contextmanager
def open_memory(name: str, content: bytes | int) -> Iterator[int]:
    """A file without a name, of `content` or so many zeros, until the block ends."""
    file = os.memfd_create(name)
    try:
        if isinstance(content, int):
            os.ftruncate(file, content)
        else:
            view = memoryview(content)
            while view:
                view = view[os.write(file, view) :]
        yield file
    finally:
        os.close(file)
