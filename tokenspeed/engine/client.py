"""A client that owns its engine process: starts it, passes its log on, ends it, and starts another
if it may. No torch.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tokenspeed.config import Config
from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.child import describe_end
from tokenspeed.engine.messages import Launch, Shutdown
from tokenspeed.engine.restarts import Restarts
from tokenspeed.log import is_routine, logger
from tokenspeed.server_config import ServerConfig
from tokenspeed.spans import span

MAX_FOLDER_PATH = 90
"""A Unix socket's path has at most 107 bytes."""
SHUTDOWN_S = 5.0
TERMINATE_S = 2.0
LAST_MESSAGES_S = 0.1
"""After the process ended, how long messages that it sent before may still take."""
TAIL_CHARS = 4000
LAST_LINES = 3


class EngineClient(AttachedClient):
    """One engine process and its first client. Others may attach at `address`; what they share lies
    in `folder`, which goes with the client.

    An engine that has served and dies is started again as `restarts` allow: `on_loss` is told why,
    and `address` is that of the next one then. Settings that it refuses are no such death.
    """

    def __init__(self, config: Config, restarts: Restarts | None = None) -> None:
        super().__init__()
        self.on_loss: Callable[[str], None] | None = None
        self._restarts = restarts
        self._restart: asyncio.Task[None] | None = None
        self._is_lost = False  # from a death until the next start
        self._number = 0
        self._kept = contextlib.ExitStack()
        # What only the HTTP side needs, its keys above all, stays here.
        engine_side = ServerConfig(
            log_level=config.server.log_level, profile_dir=config.server.profile_dir
        )
        self._config = dataclasses.replace(config, server=engine_side)
        self._startup_timeout = config.server.engine_startup_timeout
        self._process: asyncio.subprocess.Process | None = None
        self._tail = ""
        self._is_closing = False

    async def start(self) -> None:
        """Start the process and return at once; `wait_ready` waits for it. Raises EngineDead if the
        machine does not let it start.
        """
        self.phases.enter("process")
        try:
            self.folder = _socket_folder()
            self._kept.callback(shutil.rmtree, self.folder, ignore_errors=True)
            self._move()
            self.attach(self.address)
            with span("engine.spawn"):
                await self._spawn()
        except (OSError, zmq.ZMQError) as error:
            self._resources.close()
            self._kept.close()
            self.note_death(f"the engine process could not be started: {error}")
            raise self._death() from None

    def _move(self) -> None:
        """Each engine has an address of its own: nothing that was meant for one reaches another."""
        self._number += 1
        self.address = f"ipc://{self.folder}/engine-{self._number}"

    async def _spawn(self) -> None:
        """Start a process at `address`, and watch it. Raises OSError."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-P", "-m", "tokenspeed.engine.process"),  # -P: not from the current folder
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        self._process, self._tail = process, ""
        assert process.stdin is not None  # kept open: its end is how the engine knows ours
        # One that has died by now takes no line (uvloop raises RuntimeError): `_watch` tells of it.
        with contextlib.suppress(RuntimeError):
            process.stdin.write(msgspec.json.encode(Launch(self.address, self._config)) + b"\n")
        self._run(asyncio.create_task(self._watch(process)))
        self._run(asyncio.create_task(self._limit_startup(process)))

    async def close(self) -> None:
        """End the process: ask, then terminate, then kill. Open requests get EngineDead."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._restart is not None:
            self._restart.cancel()
            await asyncio.wait([self._restart])
        patience = 0.0  # while it loads it may not listen, and has nothing to lose
        if self.state == "ready":
            self._send(Shutdown())
            patience = SHUTDOWN_S
        self.note_death("the engine was closed")
        with self._kept, self._resources:
            if self._process is not None:
                await _end(self._process, patience)

    def note_death(self, message: str, *, is_refusal: bool = False) -> None:
        """The engine is gone: for good, or until the next one is there."""
        if self._is_lost and not self._is_closing:
            return
        was_served = self.ready is not None and self.state != "dead"
        if not was_served or is_refusal or self._is_closing or self._restarts is None:
            super().note_death(message, is_refusal=is_refusal)
        elif not self._restarts.allow():
            limit = self._restarts.limit
            spent = f"; it has been started again {limit} times (--engine-restarts)"
            super().note_death(message + (spent if limit else ""))
        else:
            self._is_lost = True
            self._move()
            logger.error(
                "%s; it is started again, %d of %d times (--engine-restarts)",
                *(message, self._restarts.count, self._restarts.limit),
            )
            self.note_loss(message)
            if self.on_loss is not None:
                self.on_loss(message)
            if self._restart is not None:  # it waits for the one that is lost
                self._restart.cancel()
            self._restart = asyncio.create_task(self._start_again())
            self._restart.add_done_callback(self._note_failure)

    async def _start_again(self) -> None:
        began = time.monotonic()
        assert self._process is not None
        await _end(self._process, SHUTDOWN_S)
        if self._is_closing:  # before Python 3.12 `wait_for` may swallow that this is cancelled
            return
        self.follow(self.address)
        for left in self.folder.glob("engine-*"):
            left.unlink(missing_ok=True)
        try:
            await self._spawn()
            self._is_lost = False
        except OSError as error:
            super().note_death(f"the engine process could not be started again: {error}")
            return
        await self._settled.wait()
        if self.state == "ready":
            logger.info("the engine serves again after %.1f s", time.monotonic() - began)

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        """Pass the engine's log on, then wait for its end."""
        stderr = process.stderr
        assert stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := await stderr.read(1 << 16):
            text = decoder.decode(chunk)
            sys.stderr.write(text)
            self._tail = (self._tail + text)[-TAIL_CHARS:]
        code = await process.wait()
        await asyncio.sleep(LAST_MESSAGES_S)
        self.note_death(_last_words(code, self._tail))

    async def _limit_startup(self, process: asyncio.subprocess.Process) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), self._startup_timeout)
            return
        last = f", last at: {self.progress.phase}" if self.progress else ""
        self.note_death(
            f"the engine was not ready after {self._startup_timeout:g} s{last}; "
            "raise --engine-startup-timeout if it needs longer"
        )
        with contextlib.suppress(ProcessLookupError):
            process.kill()


async def _end(process: asyncio.subprocess.Process, patience: float) -> None:
    stages = ((patience, process.terminate), (TERMINATE_S, process.kill))
    for seconds, action in stages:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
            break
        with contextlib.suppress(ProcessLookupError):
            action()
    await process.wait()


def _socket_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="tokenspeed-")
    if len(folder) > MAX_FOLDER_PATH:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="tokenspeed-", dir="/tmp")
    return Path(folder)


def _last_words(code: int, log: str) -> str:
    """How it ended, and what it last said that may be why: not what it said while all was well."""
    lines = [line.strip() for line in log.splitlines() if line.strip() and not is_routine(line)]
    said = f", after these lines: {' | '.join(lines[-LAST_LINES:])}" if lines else " without a word"
    return f"the engine process {describe_end(code)}{said}"
