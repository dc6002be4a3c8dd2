"""The HTTP process's side of the engine: starts it, talks to it, notices when it is gone. No torch.

One background task reads the socket and hands each delta to its request's stream. A stream holds at
most one delta: what a slow reader has not taken is merged into it, so memory is bounded by the
tokens of the open requests.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import dataclasses
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Literal

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.config import Config
from tokenspeed.engine.messages import (
    Abort,
    Attach,
    FromEngine,
    Launch,
    Loading,
    Ready,
    Shutdown,
    Stats,
    StepOutputs,
    Submit,
    ToEngine,
)
from tokenspeed.engine.phases import StartupPhases
from tokenspeed.request import GenerateRequest, InvalidRequest, RequestDelta
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


class EngineDead(RuntimeError):
    """The engine is gone; the message says why."""


class EngineRefused(EngineDead):
    """It could not start with these settings, or with this model."""


class _Stream:
    """What one request has received and its reader has not taken yet."""

    def __init__(self) -> None:
        self._delta: RequestDelta | None = None
        self._failure: str | None = None
        self._arrived = asyncio.Event()

    def put(self, delta: RequestDelta) -> None:
        self._delta = delta if self._delta is None else merge(self._delta, delta)
        self._arrived.set()

    def fail(self, message: str) -> None:
        self._failure = message
        self._arrived.set()

    async def get(self) -> RequestDelta:
        """The next delta; raises EngineDead once the engine is gone and nothing is left."""
        await self._arrived.wait()
        delta, self._delta = self._delta, None
        if delta is None:
            raise EngineDead(self._failure or "the engine is gone")
        if self._failure is None:
            self._arrived.clear()
        return delta


def merge(first: RequestDelta, second: RequestDelta) -> RequestDelta:
    """Two deltas of a request, in order, as one."""
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or []) + second.logprobs
    return msgspec.structs.replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        timing=second.timing or first.timing,
    )


class EngineClient:
    """One engine process and its requests. Lives on one event loop.

    `state` goes loading -> ready -> dead, or loading -> dead; `failure` says why it is dead.
    """

    def __init__(self, config: Config) -> None:
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.progress: Loading | None = None
        self.phases = StartupPhases()
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stats = Stats()
        self.stats_at = 0.0  # when they came, on the monotonic clock
        self.on_stats: Callable[[Stats, Stats], None] | None = (
            None  # told of those before, and these
        )
        # What only the HTTP side needs, its keys above all, stays here.
        engine_side = ServerConfig(log_level=config.server.log_level)
        self._config = dataclasses.replace(config, server=engine_side)
        self._startup_timeout = config.server.engine_startup_timeout
        self._streams: dict[str, _Stream] = {}
        self._settled = asyncio.Event()  # ready or dead
        self._tasks: list[asyncio.Task[None]] = []
        self._tail = ""
        self._is_closing = False
        self._is_refused = False
        self._resources = contextlib.ExitStack()

    async def start(self) -> None:
        """Start the process and return at once; `wait_ready` waits for it. Raises EngineDead if the
        machine does not let it start.
        """
        self.phases.enter("process")
        try:
            self._connect()
            with span("engine.spawn"):
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-P", "-m", "tokenspeed.engine.process"),  # -P: not from the current folder
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.PIPE,
                )
        except (OSError, zmq.ZMQError) as error:
            self._resources.close()
            self._die(f"the engine process could not be started: {error}")
            self._require_alive()
        assert self._process.stdin is not None  # kept open: its end is how the engine knows ours
        self._process.stdin.write(msgspec.json.encode(Launch(self._address, self._config)) + b"\n")
        self._tasks = [
            asyncio.create_task(self._read_socket()),
            asyncio.create_task(self._watch()),
            asyncio.create_task(self._limit_startup()),
        ]
        for task in self._tasks:
            task.add_done_callback(self._note_failure)
            self._resources.callback(task.cancel)

    def _connect(self) -> None:
        """A socket in a folder of our own; `_resources` takes both away again."""
        self._folder = _socket_folder()
        self._resources.callback(shutil.rmtree, self._folder, ignore_errors=True)
        self._address = f"ipc://{self._folder}/engine"
        context = zmq.asyncio.Context()
        self._resources.callback(context.destroy, linger=0)
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 20)  # the engine binds a moment later
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(self._address)
        self._send(Attach())

    @property
    def process_id(self) -> int:
        return self._process.pid

    async def wait_ready(self) -> None:
        """Return once the engine serves; raises EngineDead if it does not come to that,
        EngineRefused if its settings or its model are the reason.
        """
        await self._settled.wait()
        self._require_alive()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[RequestDelta, None]:
        """The request's deltas, the last with a finish reason. Closing the iterator before that, or
        cancelling its reader, aborts the request in the engine. Raises EngineDead.
        """
        await self.wait_ready()
        if request.id in self._streams:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        stream = self._streams[request.id] = _Stream()
        is_finished = False
        try:
            self._send(Submit(request))
            while not is_finished:
                delta = await stream.get()
                is_finished = delta.finish_reason is not None
                yield delta
        finally:
            del self._streams[request.id]
            if not is_finished and self.state == "ready":
                self._send(Abort([request.id]))

    async def close(self) -> None:
        """End the process: ask, then terminate, then kill. Open requests get EngineDead."""
        if self._is_closing:
            return
        self._is_closing = True
        patience = 0.0  # while it loads it may not listen, and has nothing to lose
        if self.state == "ready":
            self._send(Shutdown())
            patience = SHUTDOWN_S
        self._die("the engine was closed")
        with self._resources:
            if self._tasks:
                await self._end_process(patience)

    async def _end_process(self, patience: float) -> None:
        process = self._process
        stages = ((patience, process.terminate), (TERMINATE_S, process.kill))
        for seconds, action in stages:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), seconds)
                break
            with contextlib.suppress(ProcessLookupError):
                action()
        await process.wait()

    def _send(self, message: ToEngine) -> None:
        """Hand over to ZeroMQ, which queues without limit and sends from its own thread."""
        self._socket.send(msgspec.msgpack.encode(message))

    def _require_alive(self) -> None:
        if self.state == "dead":
            kind = EngineRefused if self._is_refused else EngineDead
            raise kind(self.failure or "the engine is gone")

    def _die(self, message: str, *, is_refusal: bool = False) -> None:
        """The engine is gone, for the reason that is given first."""
        if self.state == "dead":
            return
        self._is_refused = is_refusal
        self.state, self.failure = "dead", message
        self.phases.end()
        self._settled.set()
        for stream in self._streams.values():
            stream.fail(message)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"the link to the engine broke: {type(error).__name__}: {error}")

    async def _read_socket(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        while True:
            message = decoder.decode(await self._socket.recv())
            if self.state == "dead":
                continue
            if isinstance(message, StepOutputs):
                self._take_stats(message.stats)
                for delta in message.deltas:
                    if (stream := self._streams.get(delta.request_id)) is not None:
                        stream.put(delta)
            elif isinstance(message, Loading):
                self.progress = message
                self.phases.enter(message.phase)
            elif isinstance(message, Ready):
                self.ready, self.state = message, "ready"
                self.phases.end()
                self.stats = msgspec.structs.replace(self.stats, jit=message.jit)
                self._settled.set()
            else:
                self._die(message.message, is_refusal=message.is_refusal)

    def _take_stats(self, stats: Stats) -> None:
        before, self.stats, self.stats_at = self.stats, stats, time.monotonic()
        if self.on_stats is not None:
            self.on_stats(before, stats)

    async def _watch(self) -> None:
        """Pass the engine's log on, then wait for its end."""
        stderr = self._process.stderr
        assert stderr is not None
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        while chunk := await stderr.read(1 << 16):
            text = decoder.decode(chunk)
            sys.stderr.write(text)
            self._tail = (self._tail + text)[-TAIL_CHARS:]
        code = await self._process.wait()
        await asyncio.sleep(LAST_MESSAGES_S)
        self._die(_describe_end(code, self._tail))

    async def _limit_startup(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._settled.wait(), self._startup_timeout)
            return
        last = f", last at: {self.progress.phase}" if self.progress else ""
        self._die(
            f"the engine was not ready after {self._startup_timeout:g} s{last}; "
            "raise --engine-startup-timeout if it needs longer"
        )
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _socket_folder() -> Path:
    """A new folder that only this user can enter, with a path short enough for a Unix socket."""
    folder = tempfile.mkdtemp(prefix="tokenspeed-")
    if len(folder) > MAX_FOLDER_PATH:
        Path(folder).rmdir()
        folder = tempfile.mkdtemp(prefix="tokenspeed-", dir="/tmp")
    return Path(folder)


def _describe_end(code: int, log: str) -> str:
    if code < 0:
        ending = f"was killed by {signal.Signals(-code).name}"
    else:
        ending = f"ended with exit code {code}"
    lines = [line.strip() for line in log.splitlines() if line.strip()][-LAST_LINES:]
    words = f"; its last words: {' | '.join(lines)}" if lines else ""
    return f"the engine process {ending}{words}"
