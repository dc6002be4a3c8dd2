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

from tokenspeed.options import options_of
from tokenspeed.server_config import ServerConfig

READY = re.compile(r"ready in [\d.]+ s at (http://\S+), model ")
"""Plain HTTP: options of TLS are refused (`cli.bench_startup`)."""
STOP_S = 30.0
SPARE_S = 60.0
"""What a start may take beyond the engine's part of it (`--engine-startup-timeout`)."""
MAX_LINES = 100_000
_TLS_VARIABLES = {
    f"TOKENSPEED_{option.name.upper()}"
    for option in options_of(ServerConfig)
    if option.name.startswith("ssl_")
}


class StartFailed(RuntimeError):
    """A start gave no token; one line: why."""


@contextlib.contextmanager
def server_process(
    settings: Mapping[str, object], environ: Mapping[str, str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """A server with these settings (by option name) on a free port, and its log. It is ended,
    whatever happens. `environ` is added to this process's, of which no TLS is taken.
    """
    inherited = {name: text for name, text in os.environ.items() if name not in _TLS_VARIABLES}
    settings = {**settings, "port": 0, "log_level": "info"}
    with tempfile.TemporaryDirectory(prefix="tokenspeed-bench-") as folder:
        # JSON is YAML; a file, so that keys do not stand on a command line.
        path = Path(folder, "settings.yaml")
        path.write_bytes(msgspec.json.encode(settings))
        process = subprocess.Popen(
            # -P: what is installed, not what the current folder holds
            [sys.executable, "-P", "-m", "tokenspeed", "serve", "--config", str(path)],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**inherited, **(environ or {})},
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
        url = until_ready(process, log, deque(maxlen=MAX_LINES), start_limit(settings))
        reader = threading.Thread(target=deque, args=(log, 0), daemon=True)
        reader.start()
        try:
            yield url
        finally:
            end(process)
            reader.join(STOP_S)


def start_limit(settings: Mapping[str, object]) -> float:
    """Seconds in which a server with these settings is ready, or never will be."""
    name = "engine_startup_timeout"
    seconds = settings.get(name, getattr(ServerConfig(), name))
    assert isinstance(seconds, int | float)
    return seconds + SPARE_S


def until_ready(
    process: subprocess.Popen[str], log: IO[str], lines: deque[str], limit_s: float
) -> str:
    """Read the log into `lines`, up to the server's address, which is returned. Raises StartFailed
    if the log ends before; after `limit_s` seconds the server is killed, so that it does.
    """
    with killing_after(process, limit_s) as is_late:
        for line in log:
            lines.append(line)
            if found := READY.search(line):
                return found[1]
    if is_late.is_set():
        raise StartFailed(f"the server was not ready after {limit_s:g} s; {last_words(lines)}")
    raise StartFailed(f"the server ended before it was ready; {last_words(lines)}")


@contextlib.contextmanager
def killing_after(process: subprocess.Popen[str], seconds: float) -> Iterator[threading.Event]:
    """Kill the process, and set the event, if the block takes longer: its log ends."""
    is_late = threading.Event()

    def kill() -> None:
        is_late.set()
        process.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield is_late
    finally:
        timer.cancel()


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
    return f"its last words: {' | '.join(told[-3:])}"
