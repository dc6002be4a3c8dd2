"""Server-sent events of a running generation: how they are built, and how they reach the client.

The constant part of a job's events is encoded once. All events that are ready go out in one write,
so that a slow reader gets fewer, larger ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable
from typing import Protocol

import msgspec
from starlette.types import Send

from tokenspeed.server.errors import as_api_error
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job, offload
from tokenspeed.server.protocol import SamplingFields, Usage
from tokenspeed.server.state import ServerState

PING = b": ping\n\n"
PING_AFTER_S = 10.0
DONE = b"data: [DONE]\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)

Render = Callable[[Piece], Iterable[msgspec.Struct]]
"""A piece as the choices of the chunks that show it, an event each."""


def named_events(events: Iterable[msgspec.Struct]) -> bytes:
    """Tagged structs as events that are called by their tag."""
    blocks = []
    for event in events:
        name = str(event.__struct_config__.tag).encode()
        blocks.append(b"event: " + name + b"\ndata: " + msgspec.json.encode(event) + b"\n\n")
    return b"".join(blocks)


class Events(Protocol):
    """A job's stream as events: those before anything is generated, of each piece, and the last."""

    def start(self) -> bytes: ...
    def piece(self, piece: Piece, count: UsageCount) -> bytes: ...
    async def end(self, count: UsageCount) -> bytes: ...


class ChunkEvents:
    """Chunks of choices. Usage stands in none, in the last alone, or in every one of them."""

    def __init__(self, job: Job, kind: str, fields: SamplingFields, render: Render) -> None:
        constant = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._head = b"data: " + msgspec.json.encode(constant)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if fields.wants_usage else b"]}\n\n"
        self._in_last, self._always = fields.wants_usage, fields.wants_usage_always
        self._render = render

    def start(self) -> bytes:
        return b""

    def piece(self, piece: Piece, count: UsageCount) -> bytes:
        tail = self._usage_tail(count.usage) if self._always else self._tail
        choices = map(msgspec.json.encode, self._render(piece))
        return b"".join([self._head + choice + tail for choice in choices])

    async def end(self, count: UsageCount) -> bytes:
        usage = self._head + self._usage_tail(count.usage) if self._in_last else b""
        return usage + DONE

    def _usage_tail(self, usage: Usage) -> bytes:
        return b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n"


async def stream_job(state: ServerState, job: Job, events: Events) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of whole events."""
    count = job.usage_count()
    if head := events.start():
        yield head
    async with job.start(state) as generation:
        with KeepAlive(PING_AFTER_S, generation.nudge) as keep_alive:
            while not generation.is_done:
                block: list[bytes] = []
                for piece in await generation.take():
                    count.add(piece)
                    block.append(await _shown(state, events, piece, count))
                joined = b"".join(block)
                if joined or keep_alive.is_due:  # pieces may come that show nothing
                    yield joined or PING
                    keep_alive.restart()
    yield await events.end(count)


async def _shown(state: ServerState, events: Events, piece: Piece, count: UsageCount) -> bytes:
    """What scores a prompt, which may have a million tokens, is written down in a thread."""
    if piece.raw.prompt_logprobs is None:
        return events.piece(piece, count)
    return await offload(state, "logprobs", events.piece, piece, count)


async def run_job(state: ServerState, job: Job, events: Events) -> None:
    """Run the job to its end for whoever wants no stream: the events are dropped."""
    count = job.usage_count()
    async with job.start(state) as generation:
        while not generation.is_done:
            for piece in await generation.take():
                count.add(piece)
                events.piece(piece, count)
    await events.end(count)


class KeepAlive:
    """Calls `beat` when `seconds` have passed since the last restart. Restarting moves no timer, so
    it costs next to nothing: one timer goes off every `seconds` and looks.
    """

    def __init__(self, seconds: float, beat: Callable[[], None]) -> None:
        self._seconds, self._beat = seconds, beat
        self._loop = asyncio.get_running_loop()
        self.restart()
        self._timer = self._loop.call_at(self._due, self._look)

    def __enter__(self) -> KeepAlive:
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    @property
    def is_due(self) -> bool:
        return self._loop.time() >= self._due

    def restart(self) -> None:
        self._due = self._loop.time() + self._seconds

    def _look(self) -> None:
        later = self._due
        if self.is_due:
            self._beat()
            later = self._loop.time() + self._seconds
        self._timer = self._loop.call_at(later, self._look)


async def send_stream(send: Send, blocks: AsyncGenerator[bytes, None]) -> None:
    """Send the blocks as an event stream. A client that does not read any more is cut by the HTTP
    server.
    """
    async with contextlib.aclosing(blocks):
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        try:
            async for block in blocks:
                await send({"type": "http.response.body", "body": block, "more_body": True})
        except Exception as error:
            # The status is sent already: what is left is an event of its own.
            last = b"data: " + as_api_error(error, "a stream").body() + b"\n\n" + DONE
            await send({"type": "http.response.body", "body": last, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
