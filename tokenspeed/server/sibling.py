"""`run_sibling`: what one more HTTP process does, from its orders to its end.

It listens once it can serve, so that no connection comes to one that cannot. Its start, the load
and the engine's end are for the first process to tell of.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import ssl
from collections.abc import Callable
from pathlib import Path

from tokenspeed.engine.attached import AttachedClient, EngineDead
from tokenspeed.engine.frozen import freeze_for
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.server.app import create_app
from tokenspeed.server.coordinator_client import CoordinatorClient
from tokenspeed.server.coordinator_messages import (
    QUEUE,
    EngineGone,
    EngineLost,
    FromCoordinator,
    Orders,
    Reload,
    Started,
    Stop,
)
from tokenspeed.server.http_server import HttpServer
from tokenspeed.server.lifecycle import Signals, first_of, until_engine_dies
from tokenspeed.server.listener import join
from tokenspeed.server.queue_table import QueueTable
from tokenspeed.server.run import loaded_text, reload_of, wind_down
from tokenspeed.server.sharing import Shared
from tokenspeed.server.state import ServerState
from tokenspeed.server.tls import tls_context
from tokenspeed.text.source import ModelError
from tokenspeed.text.text_side import load_text_side


async def run_sibling(orders: Orders) -> int:
    """The exit code: 0 after a drain."""
    try:
        return await _run(orders)
    except (ConfigError, ModelError, OSError) as error:
        logger.error("%s", error)
        return 1
    except EngineDead:
        return 1


async def _run(orders: Orders) -> int:
    folder, settings = Path(orders.folder), orders.config.server
    with contextlib.ExitStack() as resources:
        is_on = settings.response_store_bytes > 0
        coordinator = CoordinatorClient(folder, orders.number, is_on=is_on)
        resources.callback(coordinator.close)
        client = AttachedClient()
        client.attach(orders.engine)
        shared = Shared(
            number=orders.number,
            first_pid=os.getppid(),
            created=orders.created,
            queue=QueueTable.open(folder / QUEUE, orders.row),
            responses=coordinator,
            places=coordinator,
            metrics_folder=folder,
        )
        state, tls = ServerState(orders.config, client, shared), tls_context(settings)
        signals = Signals()
        # A second SIGTERM changes nothing: it may be the parent's own, sent to all of its group.
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, signals.first.set)
        listener = Listener(client, signals, reload_of(state, tls))
        listening = asyncio.create_task(coordinator.listen(listener.take))
        resources.callback(listening.cancel)
        try:
            return await _serve(orders, state, signals, coordinator, tls)
        finally:
            await client.close()


async def _serve(
    orders: Orders,
    state: ServerState,
    signals: Signals,
    coordinator: CoordinatorClient,
    tls: ssl.SSLContext | None,
) -> int:
    settings = orders.config.server
    loading = asyncio.create_task(loaded_text(state, load_text_side))
    await first_of(signals.first.wait(), loading)
    if signals.first.is_set():
        return 0
    state.text = loading.result()
    freeze_for(state)
    address = (orders.host, orders.port, *orders.flow)
    listener = join(orders.family, address, settings.write_timeout)
    server = HttpServer(create_app(state), listener, settings, tls)
    try:
        coordinator.announce()
        await first_of(signals.first.wait(), server.ended(), until_engine_dies(state))
        return await wind_down(state, signals)
    finally:
        await server.stop()


class Listener:
    """Does what the first process says."""

    def __init__(
        self, client: AttachedClient, signals: Signals, reload: Callable[[], None] | None
    ) -> None:
        self._client, self._signals, self._reload = client, signals, reload

    def take(self, message: FromCoordinator) -> None:
        if isinstance(message, Started):
            self._client.phases.adopt(message.phases)
        elif isinstance(message, EngineGone):
            self._client.note_death(message.message)
        elif isinstance(message, EngineLost):
            self._client.note_loss(message.message)
            self._client.follow(message.address)
        elif isinstance(message, Reload):
            if self._reload is not None:
                self._reload()
        else:
            self._signals.first.set()
            if isinstance(message, Stop):
                self._signals.second.set()
