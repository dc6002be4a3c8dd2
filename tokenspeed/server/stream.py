"""Server-sent events of a running generation: how they are built, and how they reach the client.

The constant part of a job's events is encoded once. All events that are ready go out in one write,
so that a slow reader gets fewer, larger ones. A client that stops reading is cut after a while.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Iterable

import msgspec
from starlette.types import Receive, Send

from tokenspeed.server.asgi import ClientGone, until_disconnect
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
    encoder = ChunkEncoder(job, kind, fields)
    count, now = job.usage_count(), asyncio.get_running_loop().time
    async with job.start(state) as generation:
        ping_at = now() + PING_AFTER_S
        while not generation.is_done:
            block = []
            for piece in await generation.take(ping_at - now()):
                count.add(piece)
                block += [encoder.choice(choice, count) for choice in render(piece)]
            if block or now() >= ping_at:  # pieces may come that show nothing
                yield b"".join(block) or PING
                ping_at = now() + PING_AFTER_S
    yield (encoder.usage(count.usage) if fields.wants_usage else b"") + DONE


async def send_stream(
    receive: Receive, send: Send, blocks: AsyncGenerator[bytes, None], write_timeout_s: float
) -> None:
    """Send the blocks as an event stream. Raises ClientGone when the client leaves or stalls."""
    await until_disconnect(receive, _send_blocks(send, blocks, write_timeout_s))


async def _send_blocks(
    send: Send, blocks: AsyncGenerator[bytes, None], write_timeout_s: float
) -> None:
    async def write(block: bytes, more: bool = True) -> None:
        try:
            async with asyncio.timeout(write_timeout_s):
                await send({"type": "http.response.body", "body": block, "more_body": more})
        except TimeoutError:
            raise ClientGone(f"did not read for {write_timeout_s:g} s") from None

    async with contextlib.aclosing(blocks):
        await send({"type": "http.response.start", "status": 200, "headers": list(HEADERS)})
        try:
            async for block in blocks:
                await write(block)
        except ClientGone:
            raise
        except Exception as error:
            # The status is sent already: what is left is an event of its own.
            await write(b"data: " + as_api_error(error, "a stream").body() + b"\n\n" + DONE)
        await write(b"", more=False)
