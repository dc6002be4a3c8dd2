"""Server-sent events of a running generation: how they are built, and how they reach the client.

The constant part of a job's events is encoded once. All events that are ready go out in one write,
so that a slow reader gets fewer, larger ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

import msgspec
from starlette.types import Receive, Send

from tokenspeed.server.asgi import until_disconnect
from tokenspeed.server.errors import as_api_error
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job
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


class ChunkEncoder:
    """Events of one job. Usage stands in none, in the last alone, or in every one of them."""

    def __init__(self, job: Job, kind: str, fields: SamplingFields) -> None:
        constant = {"id": job.id, "object": kind, "created": job.created, "model": job.model}
        self._head = b"data: " + msgspec.json.encode(constant)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if fields.wants_usage else b"]}\n\n"
        self._always = fields.wants_usage_always

    def choice(self, choice: msgspec.Struct, count: UsageCount) -> bytes:
        tail = self._usage_tail(count.usage) if self._always else self._tail
        return self._head + msgspec.json.encode(choice) + tail

    def usage(self, usage: Usage) -> bytes:
        return self._head + self._usage_tail(usage)

    def _usage_tail(self, usage: Usage) -> bytes:
        return b'],"usage":' + msgspec.json.encode(usage) + b"}\n\n"


async def stream_job(
    state: ServerState, job: Job, fields: SamplingFields, kind: str, render: Render
) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of whole events, the last one with [DONE]."""
    encoder, count = ChunkEncoder(job, kind, fields), job.usage_count()
    async with job.start(state) as generation:
        with Pulse(PING_AFTER_S, generation.nudge) as pulse:
            while not generation.is_done:
                block = []
                for piece in await generation.take():
                    count.add(piece)
                    block += [encoder.choice(choice, count) for choice in render(piece)]
                if block or pulse.is_due:  # pieces may come that show nothing
                    yield b"".join(block) or PING
                    pulse.restart()
    yield (encoder.usage(count.usage) if fields.wants_usage else b"") + DONE


class Pulse:
    """Calls `beat` when `seconds` have passed since the last restart. Restarting moves no timer, so
    it costs next to nothing: one timer goes off every `seconds` and looks.
    """

    def __init__(self, seconds: float, beat: Callable[[], None]) -> None:
        self._seconds, self._beat = seconds, beat
        self._loop = asyncio.get_running_loop()
        self.restart()
        self._timer = self._loop.call_at(self._due, self._look)

    def __enter__(self) -> Pulse:
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


async def send_stream(receive: Receive, send: Send, blocks: AsyncGenerator[bytes, None]) -> None:
    """Send the blocks as an event stream. Raises ClientGone when the client leaves; one that does
    not read any more is cut by the HTTP server.
    """
    await until_disconnect(receive, _send_blocks(send, blocks))


async def _send_blocks(send: Send, blocks: AsyncGenerator[bytes, None]) -> None:
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
