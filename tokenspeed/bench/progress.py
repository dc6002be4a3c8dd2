"""How far a load is, on stderr: a bar on a terminal, else a line now and then, for logs."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator

from tqdm import tqdm

from tokenspeed.bench.answer import Record
from tokenspeed.bench.load import Load

INTERVAL_S = 10.0
"""Between two lines."""


def tell(line: str) -> None:
    """Say what is being done."""
    print(line, file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def progress(load: Load, total: int, *, is_hidden: bool) -> AsyncIterator[None]:
    """Meanwhile `load`, of `total` requests, is told of."""
    bar = tqdm(total=total, desc="Requests", disable=is_hidden or not sys.stderr.isatty())

    def update(record: Record) -> None:
        bar.update()

    load.on_done = update
    lines = asyncio.create_task(_lines(load, total)) if bar.disable and not is_hidden else None
    try:
        yield
    finally:
        bar.close()
        if lines is not None:
            lines.cancel()


async def _lines(load: Load, total: int) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        seconds = time.monotonic() - began
        tell(f"{len(load.records)} of {total} requests have ended after {seconds:.0f} s")
