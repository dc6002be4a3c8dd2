"""A `tokenspeed serve` of its own process, for a measurement: started, watched, ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

READY = re.compile(r"ready in [\d.]+ s at (http://\S+), model ")
STOP_S = 30.0
MAX_LINES = 100_000


class StartFailed(RuntimeError):
    """A start gave no token; one line: why."""


@contextlib.contextmanager
def server_process(
    settings: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A server with these settings (by option name) on a free port, and its log. It is ended,
    whatever happens. `environ` is added to this process's.
    """
    settings = {**settings, "port": 0, "log_level": "info"}
    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        # JSON is YAML; a file, so that keys do not stand on a command line.
        path = Path(folder, "settings.yaml")
        path.write_bytes(msgspec.json.encode(settings))
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", "serve", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **(environ or {})},
        )
        assert process.stderr is not None
        try:
            with process.stderr as log:
                yield process, log
        finally:
            end(process)


@contextlib.contextmanager
def serving(
    settings: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Iterator[str]:
    """The address of a server that is ready. Raises StartFailed. Its log is read and forgotten; on
    the way out the server is ended, and has exited.
    """
    with server_process(settings, environ) as (process, log):
        lines: deque[str] = deque(maxlen=MAX_LINES)
        for line in log:
            lines.append(line)
            found = READY.search(line)
            if found:
                break
        else:
            raise StartFailed(last_words(lines))
        reader = threading.Thread(target=deque, args=(log, 0), daemon=True)
        reader.start()
        try:
            yield found[1]
        finally:
            end(process)
            reader.join(STOP_S)


def end(process: subprocess.Popen[str]) -> None:
    """Ask it to end, and see that it does."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(lines: Iterable[str]) -> str:
    told = [line.strip() for line in lines if "startup_timing" not in line and line.strip()]
    return f"the server ended before it was ready; its last words: {' | '.join(told[-3:])}"
