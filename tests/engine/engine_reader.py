"""An engine process from outside: the deltas of a request as an async iterator; its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.client import EngineClient
from tokenspeed.request import GenerateRequest, RequestDelta


class _Sink:
    def __init__(self) -> None:
        self.queue: asyncio.Queue[RequestDelta | Exception] = asyncio.Queue()

    def put(self, delta: RequestDelta) -> None:
        self.queue.put_nowait(delta)

    def fail(self, error: Exception) -> None:
        self.queue.put_nowait(error)


async def generate(
    client: AttachedClient, request: GenerateRequest
) -> AsyncGenerator[RequestDelta, None]:
    """The request's deltas; closing the iterator aborts it."""
    await client.wait_ready()
    sink = _Sink()
    client.submit(request, sink)
    try:
        is_finished = False
        while not is_finished:
            came = await sink.queue.get()
            if isinstance(came, Exception):
                raise came
            is_finished = came.finish_reason is not None
            yield came
    finally:
        client.withdraw(request.id)


def process_id(client: EngineClient) -> int:
    assert client._process is not None, "not started"
    return client._process.pid
