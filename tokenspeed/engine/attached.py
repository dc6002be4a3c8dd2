"""A client of an engine process that somebody started: submits requests, hands on what comes. No
torch.

One background task reads the socket and hands each delta to its request's sink, at once and on the
event loop: nothing is queued here, and no task wakes for a token. What has come meanwhile is taken
together: a process that is behind makes text and events of a request's tokens once for all of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Literal, Protocol

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.engine.commands import Commands
from tokenspeed.engine.deltas import joined
from tokenspeed.engine.messages import (
    Abort,
    Attach,
    Done,
    FromEngine,
    Loading,
    PromptScores,
    Ready,
    Stats,
    StepOutputs,
    Submit,
    ToEngine,
)
from tokenspeed.engine.phases import StartupPhases
from tokenspeed.engine.prompt_scores import EncodedScores
from tokenspeed.request import FinishReason, GenerateRequest, InvalidRequest, RequestDelta

MAX_AT_ONCE = 32
"""Messages of the engine that are taken together, before anything else has its turn."""
_FAILURES = (FinishReason.ERROR, FinishReason.ABORT)
"""They are handed out by themselves: what came before them still counts."""


class EngineDead(RuntimeError):
    """The engine is gone; the message says why."""


class EngineRefused(EngineDead):
    """It could not start with these settings, or with this model."""


class EngineAway(EngineDead):
    """It died before it was asked, and another is being started in its place."""


class Sink(Protocol):
    """Takes what a request receives, on the event loop; neither call may block or raise."""

    def put(self, delta: RequestDelta) -> None: ...

    def fail(self, error: Exception) -> None:
        """The engine is gone: nothing more comes."""


class AttachedClient:
    """Requests to one engine. Lives on one event loop.

    `state` goes loading -> ready -> dead, or loading -> dead; `failure` says why it is dead. Who
    started the engine knows of its end first, and tells it with `note_death`; or with `note_loss`
    and `follow` if another takes its place, which makes `state` loading again.
    """

    def __init__(self) -> None:
        self.state: Literal["loading", "ready", "dead"] = "loading"
        self.progress: Loading | None = None
        self.phases = StartupPhases()
        self.ready: Ready | None = None
        self.failure: str | None = None
        self.stats = Stats()
        self.stats_at = 0.0
        """When they came, on the monotonic clock."""
        self.on_stats: Callable[[Stats, Stats], None] | None = None
        """Told of those before, and these."""
        self.commands = Commands(self._send)
        self._sinks: dict[str, Sink] = {}
        self._scores: dict[str, list[PromptScores]] = {}
        """Those of prompts that are here ahead of their deltas."""
        self._settled = asyncio.Event()  # ready or dead
        self._is_refused = False
        self._resources = contextlib.ExitStack()  # of one engine's life

    def attach(self, address: str) -> None:
        """Connect, and read from now on. The engine may bind the address a moment later."""
        context = zmq.asyncio.Context()
        self._resources.callback(context.destroy, linger=0)
        self._socket = context.socket(zmq.DEALER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.RECONNECT_IVL, 20)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(address)
        self._send(Attach())
        self._run(asyncio.create_task(self._read_socket()))

    def _run(self, task: asyncio.Task[None]) -> None:
        """A background task whose failure is the engine's end."""
        task.add_done_callback(self._note_failure)
        self._resources.callback(task.cancel)

    async def wait_ready(self) -> None:
        """Return once the engine serves; raises EngineDead if it does not come to that,
        EngineRefused if its settings or its model are the reason.
        """
        await self._settled.wait()
        self._require_alive()

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Start a request in an engine that is ready; `sink` gets its deltas, the last with a
        finish reason. Raises EngineDead (EngineAway if there will be another), or InvalidRequest
        for an id that is in use.
        """
        self._require_alive()
        if self.state == "loading":
            raise EngineAway("the engine is being started")
        if request.id in self._sinks:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        self._sinks[request.id] = sink
        self._send(Submit(request))

    def withdraw(self, request_id: str) -> None:
        """Abort a request of ours, unless it has finished. Its sink gets nothing more."""
        self._scores.pop(request_id, None)
        if self._sinks.pop(request_id, None) is not None and self.state == "ready":
            self._send(Abort([request_id]))

    async def close(self) -> None:
        """Leave the engine, which goes on. Open requests get EngineDead."""
        self.note_death("the engine was left")
        self._resources.close()

    def _send(self, message: ToEngine) -> None:
        """Hand over to ZeroMQ, which queues without limit and sends from its own thread."""
        self._socket.send(msgspec.msgpack.encode(message))

    def _require_alive(self) -> None:
        if self.state == "dead":
            raise self._death()

    def _death(self) -> EngineDead:
        kind = EngineRefused if self._is_refused else EngineDead
        return kind(self.failure or "the engine is gone")

    def note_death(self, message: str, *, is_refusal: bool = False) -> None:
        """The engine is gone, for the reason that is given first."""
        if self.state == "dead":
            return
        self._is_refused = is_refusal
        self.state, self.failure = "dead", message
        self.phases.end()
        self._settled.set()
        self._fail_all(self._death())

    def note_loss(self, message: str) -> None:
        """The engine is gone, and another one will be there to `follow`."""
        self.state, self.progress = "loading", Loading("restart", "of the engine")
        self._settled.clear()
        self._fail_all(EngineDead(message))
        self.commands.fail(EngineAway(message))  # those to come

    def follow(self, address: str) -> None:
        """Attach to the engine that takes the place of one that was lost."""
        self._resources.close()
        self._sinks.clear()
        self._scores.clear()
        self.commands = Commands(self._send)
        self.stats, self.stats_at = Stats(), time.monotonic()
        self.attach(address)

    def _fail_all(self, error: EngineDead) -> None:
        for sink in tuple(self._sinks.values()):
            sink.fail(error)
        self.commands.fail(error)

    def _note_failure(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note_death(f"the link to the engine broke: {type(error).__name__}: {error}")

    async def _read_socket(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromEngine)
        at_once: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        while True:
            messages = [decoder.decode(await self._socket.recv())]
            with contextlib.suppress(zmq.Again):
                while len(messages) < MAX_AT_ONCE and not isinstance(messages[-1], PromptScores):
                    messages.append(decoder.decode(at_once.recv(zmq.NOBLOCK)))
            self._take(messages)
            await asyncio.sleep(0)  # what was handed out is written before more is taken

    def _take(self, messages: list[FromEngine]) -> None:
        news = _News()
        for message in messages:
            if self.state == "dead":
                return
            if isinstance(message, StepOutputs):
                self._take_stats(message.stats)
                self._complete_scores(message.deltas)
                news.add(message)
                continue
            if isinstance(message, PromptScores):
                if message.request_id in self._sinks:
                    self._scores.setdefault(message.request_id, []).append(message)
                continue
            self._hand_out(news.deltas)
            news = _News()
            if isinstance(message, Done):
                self.commands.put(message)
            elif isinstance(message, Loading):
                self.progress = message
                if self.ready is None:  # the phases are those of the first start
                    self.phases.enter(message.phase)
            elif isinstance(message, Ready):
                self.ready, self.state = message, "ready"
                self.phases.end()
                self.stats = msgspec.structs.replace(self.stats, jit=message.jit)
                self._settled.set()
            else:
                self.note_death(message.message, is_refusal=message.is_refusal)
        self._hand_out(news.deltas)

    def _take_stats(self, stats: Stats) -> None:
        before, self.stats, self.stats_at = self.stats, stats, time.monotonic()
        if self.on_stats is not None:
            self.on_stats(before, stats)

    def _complete_scores(self, deltas: list[RequestDelta]) -> None:
        """Put what came ahead of these deltas where it belongs."""
        if not self._scores:
            return
        for delta in deltas:
            if delta.prompt_logprobs is not None:
                ahead = self._scores.pop(delta.request_id, [])
                delta.prompt_logprobs = EncodedScores(ahead, delta.prompt_logprobs)

    def _hand_out(self, deltas: dict[str, list[RequestDelta]]) -> None:
        for id, each in deltas.items():
            failure = each.pop() if each[-1].finish_reason in _FAILURES else None
            if each and (sink := self._sink_of(id, each[-1])) is not None:
                sink.put(joined(each))
            if failure is not None and (sink := self._sink_of(id, failure)) is not None:
                sink.put(failure)

    def _sink_of(self, id: str, delta: RequestDelta) -> Sink | None:
        if delta.finish_reason is not None:
            return self._sinks.pop(id, None)
        return self._sinks.get(id)


class _News:
    """What steps have brought, by request. Tokens that came with nothing else become one delta, to
    which each is added when it comes: nothing is made for a token.
    """

    def __init__(self) -> None:
        self.deltas: dict[str, list[RequestDelta]] = {}
        self._runs: dict[str, list[int]] = {}
        """Of requests whose latest delta is a run of tokens: its tokens."""

    def add(self, outputs: StepOutputs) -> None:
        for id, token in zip(outputs.ids, outputs.tokens, strict=True):
            run = self._runs.get(id)
            if run is None:
                run = self._runs[id] = []
                self.deltas.setdefault(id, []).append(RequestDelta(request_id=id, token_ids=run))
            run.append(token)
        for delta in outputs.deltas:
            self.deltas.setdefault(delta.request_id, []).append(delta)
            self._runs.pop(delta.request_id, None)
