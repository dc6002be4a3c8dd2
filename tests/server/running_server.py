"""`run_server` on a real port over a scripted engine, in the test's process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
from server_fakes import FakeClient, make_state

from tokenspeed.config import make_config
from tokenspeed.server.listener import listen, url_of
from tokenspeed.server.run import run_server
from tokenspeed.server.siblings import Siblings


class Running:
    """`run_server` over a scripted engine, in this process."""

    def __init__(self, client: FakeClient, load_text: Any = None, **options: Any) -> None:
        self.client = client
        config = make_config({"served_model_name": ("m",), "drain_timeout": 0.5, **options})
        text = make_state(client).text
        listener = listen("127.0.0.1", 0, 5.0)
        self.url = url_of(listener)
        self.port = listener.getsockname()[1]
        self.http = httpx.AsyncClient(base_url=self.url, timeout=10)
        load = load_text or (lambda _: text)
        siblings = Siblings(config, client, listener)  # type: ignore[arg-type]
        siblings.start()
        self.task = asyncio.create_task(
            run_server(
                config,
                client,  # type: ignore[arg-type]
                listener,
                siblings,
                began=time.monotonic(),
                load_text=load,
            )
        )

    async def until(self, phase: str) -> None:
        async with asyncio.timeout(10):
            while (await self.http.get("/ready")).json()["status"] != phase:
                await asyncio.sleep(0.01)

    async def end(self, seconds: float = 10.0) -> int:
        async with asyncio.timeout(seconds):
            return await self.task


@contextlib.asynccontextmanager
async def running(
    client: FakeClient, load_text: Any = None, **options: Any
) -> AsyncIterator[Running]:
    server = Running(client, load_text, **options)
    try:
        yield server
    finally:
        await server.http.aclose()
        if not server.task.done():
            os.kill(os.getpid(), signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                await server.end()
        assert client.num_closed == 1
