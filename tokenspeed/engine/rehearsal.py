"""A start rehearsed in a process of its own, as its parent sees it.

    stdin    one line of JSON (`Rehearsal`); then silence, and its end is the parent's end
    stdout   a line of JSON a message (`Rehearsing`, `Rehearsed`, `RehearsalFailed`)
    stderr   the parent's

The child runs made-up weights, as many as the model has. What it leaves is what a start finds: on
CUDA compiled kernels (`device_kernels.py`), on a CPU the table of linear kernels.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable

import msgspec

from tokenspeed.config import Config
from tokenspeed.ledger import JitCount

MODULE = "tokenspeed.engine.rehearsal_process"
_END_S = 30.0


class Rehearsal(msgspec.Struct, frozen=True):
    """Which start. Its program is in the cache."""

    config: Config
    num_threads: int


class Rehearsing(msgspec.Struct, tag="rehearsing", frozen=True):
    """What is being done, in a line for people."""

    detail: str


class Rehearsed(msgspec.Struct, tag="rehearsed", frozen=True):
    """The start got ready. `jit` says what it compiled and measured, which later ones need not."""

    seconds: float
    jit: tuple[JitCount, ...]


class RehearsalFailed(msgspec.Struct, tag="failed", frozen=True):
    """One line: what, why."""

    message: str


FromRehearsal = Rehearsing | Rehearsed | RehearsalFailed


def rehearse(rehearsal: Rehearsal, progress: Callable[[str], None]) -> Rehearsed | RehearsalFailed:
    """Rehearse a start. Whatever happens here, no process stays behind."""
    command = [sys.executable, "-P", "-m", MODULE]  # -P: nothing from the current folder
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    decoder = msgspec.json.Decoder(FromRehearsal)
    last: Rehearsed | RehearsalFailed | None = None
    try:
        with contextlib.suppress(BrokenPipeError):  # it is gone, as its silence will tell
            process.stdin.write(msgspec.json.encode(rehearsal) + b"\n")
            process.stdin.flush()
        for line in process.stdout:
            message = decoder.decode(line)
            if isinstance(message, Rehearsing):
                progress(message.detail)
            else:
                last = message
        code = process.wait(_END_S)  # what it compiled is kept, at the latest, as it ends
        return last or RehearsalFailed(f"its process ended with exit code {code}")
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stdout.close()
        if process.poll() is None:
            process.kill()
            process.wait()
