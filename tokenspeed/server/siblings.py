"""The other HTTP processes of a server, as the first one has them: started, watched, started again.

All listen on one port, and the kernel deals connections out among them. Each is a client of the
engine of its own; what has to be one for the server is shared (`sharing.py`) or kept at the first
process's coordinator (`coordinator.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from tokenspeed.config import Config
from tokenspeed.engine.attached import EngineDead
from tokenspeed.engine.child import describe_end
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.restarts import Restarts
from tokenspeed.log import logger
from tokenspeed.server.coordinator import Coordinator
from tokenspeed.server.coordinator_messages import (
    QUEUE,
    Drain,
    EngineLost,
    FromCoordinator,
    Orders,
    Ping,
    Started,
    Stop,
)
from tokenspeed.server.key_places import KeyCounts
from tokenspeed.server.listener import share
from tokenspeed.server.queue_table import QueueTable
from tokenspeed.server.sharing import Shared, alone, share_metrics

RESTARTS = 5
WINDOW_S = 60.0
"""More ends than that in this time end the server."""
PING_S, PINGS = 1.0, 10
"""A sibling that serves is pinged so often; one that answers none of so many hangs, and is killed.
Pings are counted, not seconds, in which this process may have been stopped itself.
"""
STOP_S = 5.0
"""How long siblings may take to end when they are told to end now."""


class SiblingsFailed(RuntimeError):
    """The server cannot go on with its siblings; the message is one line that says why."""


@dataclass
class _Sibling:
    number: int
    row: int
    process: asyncio.subprocess.Process
    is_serving: bool = False
    num_unanswered: int = 0
    """Pings since it was last heard of."""


class Siblings:
    """`--api-processes` less one processes, that is none as a rule. `shared` is what the first
    process has in common with them. Lives on one event loop.
    """

    def __init__(self, config: Config, client: EngineClient, listener: socket.socket) -> None:
        self._config, self._client, self._listener = config, client, listener
        self._rows = range(1, config.server.api_processes)
        self.shared = alone(config.server)
        self._siblings: dict[int, _Sibling] = {}
        self._number = 0
        self._restarts = Restarts(RESTARTS, WINDOW_S)
        self._all_serve = asyncio.Event()
        self._started: Started | None = None
        self._is_ending = False
        self._keepers: list[asyncio.Task[None]] = []
        self._resources = contextlib.ExitStack()

    def start(self) -> None:
        """Have them started, on what must be the engine's folder. The listener is shared from now
        on. Returns at once.
        """
        if not self._rows:
            self._all_serve.set()
            return
        share(self._listener)
        folder = self._client.folder / "http"
        folder.mkdir()
        self._folder = folder
        self._resources.callback(shutil.rmtree, folder, ignore_errors=True)
        share_metrics(folder)
        places = KeyCounts()
        self.shared = Shared(
            number=0,
            first_pid=os.getpid(),
            created=self.shared.created,
            queue=QueueTable.create(folder / QUEUE, 1 + len(self._rows)),
            responses=self.shared.responses,
            places=places,
            metrics_folder=folder,
        )
        self._coordinator = Coordinator(
            folder, self.shared.responses, places, self._note_serving, self._note_pong
        )
        self._resources.callback(self._coordinator.close)
        serving = asyncio.create_task(self._coordinator.serve())
        self._resources.callback(serving.cancel)
        pinging = asyncio.create_task(self._ping())
        self._resources.callback(pinging.cancel)
        self._client.on_loss = self._note_loss
        self._keepers = [asyncio.create_task(self._keep(row)) for row in self._rows]

    async def wait_serving(self) -> None:
        """Return when all serve for the first time."""
        await self._all_serve.wait()

    def note_started(self, started: Started) -> None:
        """The server's start is over, and siblings may be told of it."""
        self._started = started
        self.tell(started)

    async def watch(self) -> NoReturn:
        """Wait until the server cannot go on; raises SiblingsFailed."""
        if self._keepers:
            done, _ = await asyncio.wait(self._keepers, return_when=asyncio.FIRST_EXCEPTION)
            for keeper in done:
                keeper.result()
        await asyncio.Event().wait()
        raise AssertionError

    def tell(self, message: FromCoordinator) -> None:
        for number in self._siblings:
            self._coordinator.tell(number, message)

    async def end(self, at_once: asyncio.Event, seconds: float) -> None:
        """Have those that serve drain, and wait until they have ended: for `seconds`, or until
        `at_once` is set.
        """
        if not self._keepers:
            return
        self._is_ending = True
        for sibling in tuple(self._siblings.values()):
            if sibling.is_serving:
                self._coordinator.tell(sibling.number, Drain())
            else:
                _kill(sibling.process)
        ended = asyncio.gather(*self._keepers, return_exceptions=True)
        second = asyncio.create_task(at_once.wait())
        waits: set[asyncio.Future[object]] = {ended, second}  # type: ignore[arg-type]
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        second.cancel()
        self.tell(Stop())
        await asyncio.wait(self._keepers, timeout=STOP_S)

    async def close(self) -> None:
        """Kill those that are left."""
        self._is_ending = True
        for sibling in self._siblings.values():
            _kill(sibling.process)
        if self._keepers:
            await asyncio.wait(self._keepers)
        self._resources.close()

    async def _keep(self, row: int) -> None:
        """See to it that the row has a process, until the server or the engine ends. Raises
        SiblingsFailed.
        """
        while not self._is_ending:
            with self._process(await self._spawn(row), row) as sibling:
                code = await sibling.process.wait()
            if self._is_ending or self._client.state == "dead":
                return
            ending = describe_end(code)
            if not self._all_serve.is_set():
                raise SiblingsFailed(f"HTTP process {row} of the server {ending} while it started")
            if not self._restarts.allow():
                raise SiblingsFailed(
                    f"HTTP process {row} of the server {ending}: "
                    f"more than {RESTARTS} such ends in {WINDOW_S:g} s"
                )
            logger.warning(
                "HTTP process %d of the server %s: its requests are aborted, and it is started "
                "again",
                row,
                ending,
            )
            await self._have_it_noticed()

    async def _spawn(self, row: int) -> asyncio.subprocess.Process:
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", "tokenspeed.server.process"),  # -P: not from the current folder
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
            )
        except OSError as error:
            raise SiblingsFailed(f"HTTP process {row} could not be started: {error}") from None

    @contextlib.contextmanager
    def _process(self, process: asyncio.subprocess.Process, row: int) -> Iterator[_Sibling]:
        """A process from its orders on; what is left of it is tidied up."""
        self._number += 1
        sibling = _Sibling(self._number, row, process)
        self._siblings[sibling.number] = sibling
        self._coordinator.admit(sibling.number)
        if self._is_ending:
            _kill(process)
        orders = self._orders(sibling)
        assert process.stdin is not None  # kept open: its end is how it knows ours
        try:
            with contextlib.suppress(RuntimeError):  # uvloop's, where it has died by now
                process.stdin.write(msgspec.json.encode(orders) + b"\n")
            yield sibling
        finally:
            del self._siblings[sibling.number]
            self._coordinator.dismiss(sibling.number)
            process.stdin.close()
            self.shared.queue.clear(row)

    def _orders(self, sibling: _Sibling) -> Orders:
        host, port, *flow = self._listener.getsockname()
        return Orders(
            number=sibling.number,
            row=sibling.row,
            config=self._config,
            folder=str(self._folder),
            engine=self._client.address,
            family=self._listener.family,
            host=host,
            port=port,
            flow=tuple(flow),
            created=self.shared.created,
        )

    def _note_serving(self, number: int) -> None:
        if number not in self._siblings:
            return
        self._siblings[number].is_serving = True
        if self._started is not None:
            self._coordinator.tell(number, self._started)
        serving = [each for each in self._siblings.values() if each.is_serving]
        if len(serving) == len(self._rows):
            self._all_serve.set()

    def _note_pong(self, number: int) -> None:
        if number in self._siblings:
            self._siblings[number].num_unanswered = 0

    async def _ping(self) -> None:
        """Kill those that hang, until cancelled: who keeps their rows sees to the rest."""
        while True:
            await asyncio.sleep(PING_S)
            for sibling in self._siblings.values():
                if not sibling.is_serving:
                    continue
                if sibling.num_unanswered >= PINGS:
                    logger.error(
                        "HTTP process %d of the server has not answered for %g s, and is killed",
                        sibling.row,
                        PINGS * PING_S,
                    )
                    _kill(sibling.process)
                sibling.num_unanswered += 1
                self._coordinator.tell(sibling.number, Ping())

    def _note_loss(self, message: str) -> None:
        """Siblings follow the engine. One that is only starting might miss where to: it is started
        again, with other orders.
        """
        self.tell(EngineLost(message, self._client.address))
        for sibling in self._siblings.values():
            if not sibling.is_serving:
                _kill(sibling.process)

    async def _have_it_noticed(self) -> None:
        """An engine that does nothing finds that a client is gone when it tells all something."""
        if self._client.state == "ready":
            with contextlib.suppress(EngineDead):
                await self._client.commands.ask("tell")


def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
