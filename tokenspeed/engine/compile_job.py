"""Compiling in a process of its own, as its parent sees it.

    stdin    one line of JSON (`CompileJob`); then silence, and its end is the parent's end
    stdout   a line of JSON a message (`Compiling`, `Compiled`, `CompileFailed`)
    stderr   the parent's

The child has no weights, so the parent loads them meanwhile; a thread would only take turns with
it. What it leaves is a cache entry, which the parent then loads as any later start does.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenspeed.compile.cache import CompileCache
from tokenspeed.config import Config
from tokenspeed.ledger import JitCount

MODULE = "tokenspeed.engine.compile_process"
_POLL_S = 0.2
_KILL_S = 5.0


class CompileJob(msgspec.Struct, frozen=True):
    """What to compile, and the digest of the facts that the parent has for it."""

    config: Config
    root: str
    digest: str
    num_threads: int
    in_blocks: bool = False
    """Whether the engine keeps weights in blocks that can be kept so."""


class Compiling(msgspec.Struct, tag="compiling", frozen=True):
    """What is being done, in a line for people."""

    detail: str


class Compiled(msgspec.Struct, tag="compiled", frozen=True):
    """The entry is in the cache. `summary` says in a line what the passes did, `jit` what was
    compiled, which is nothing if another process had done it.
    """

    seconds: float
    summary: str
    jit: tuple[JitCount, ...] = ()


class CompileFailed(msgspec.Struct, tag="failed", frozen=True):
    """One line: what, why. `is_strict`: a pass did less than `--strict-passes` asks for."""

    message: str
    is_strict: bool = False


FromCompiler = Compiling | Compiled | CompileFailed


class CompileChild:
    """A running compiler process. `close` ends it."""

    def __init__(self, job: CompileJob) -> None:
        self._job = job
        self._messages: queue.SimpleQueue[FromCompiler | None] = queue.SimpleQueue()
        command = [sys.executable, "-P", "-m", MODULE]  # -P: nothing from the current folder
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone, as `wait` will find
            self._process.stdin.write(msgspec.json.encode(job) + b"\n")
            self._process.stdin.flush()
        threading.Thread(target=self._read, name="compile-messages", daemon=True).start()

    def wait(self, progress: Callable[[str], None]) -> Compiled | CompileFailed:
        """Wait for the end and pass progress on. `progress` is called now and again in any case, so
        that it may raise.
        """
        detail, last = "start", None
        while True:
            try:
                message = self._messages.get(timeout=_POLL_S)
            except queue.Empty:
                progress(detail)
                continue
            if message is None:
                code = self._process.wait()
                return last or CompileFailed(f"the compiler ended with exit code {code}")
            if isinstance(message, Compiling):
                detail = message.detail
                progress(detail)
            else:
                last = message

    def close(self) -> None:
        """End the process, if it still runs. Closing its stdin lets it tidy up; what it could not,
        being killed or in the middle of a write, is removed here.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_KILL_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        CompileCache(Path(self._job.root)).abandon(self._job.digest)

    def _read(self) -> None:
        assert self._process.stdout is not None
        decoder = msgspec.json.Decoder(FromCompiler)
        with self._process.stdout as lines:
            for line in lines:
                with contextlib.suppress(msgspec.DecodeError):
                    self._messages.put(decoder.decode(line))
        self._messages.put(None)
