"""A sibling's link to the first HTTP process: the responses and the counts that are kept there, and
its words.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.log import logger
from tokenspeed.server.coordinator_messages import (
    COORDINATOR,
    Answer,
    Find,
    Forget,
    FromCoordinator,
    GivePlace,
    Keep,
    Ping,
    Pong,
    Serving,
    TakePlace,
    ToCoordinator,
)
from tokenspeed.server.errors import APIError, unavailable
from tokenspeed.server.response_store import StoredResponse

ANSWER_S = 5.0
"""How long the first process may take to answer, which takes it no time unless it hangs."""


class CoordinatorClient:
    """As the sibling `number`. It also is `Responses` and `KeyPlaces`: those of the first process.
    Where that hangs, what needs it is refused with a 503, at once until it is heard of again: it
    pings each sibling every second. Lives on one event loop.
    """

    def __init__(self, folder: Path, number: int, *, is_on: bool) -> None:
        self.is_on = is_on
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._hangs = False
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set(zmq.IDENTITY, str(number).encode())
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(f"ipc://{folder / COORDINATOR}")

    def announce(self) -> None:
        """This process serves."""
        self._send(Serving())

    async def listen(self, on_word: Callable[[FromCoordinator], None]) -> None:
        """Read until cancelled; `on_word` is given what is neither an answer nor a `Ping`."""
        decoder = msgspec.msgpack.Decoder(FromCoordinator)
        while True:
            message = decoder.decode(await self._socket.recv())
            self._hangs = False
            if isinstance(message, Ping):
                self._send(Pong())
            elif not isinstance(message, Answer):
                on_word(message)
            elif message.number in self._waiting and not self._waiting[message.number].done():
                self._waiting[message.number].set_result(message)

    async def put(self, id: str, answer: bytes, items: bytes) -> bool:
        try:
            return (await self._ask(Keep(next(self._numbers), id, answer, items))).is_done
        except APIError:
            return False  # there is an answer, which only is not kept

    async def get(self, id: str) -> StoredResponse | None:
        return (await self._ask(Find(next(self._numbers), id))).stored

    async def delete(self, id: str) -> bool:
        return (await self._ask(Forget(next(self._numbers), id))).is_done

    @contextlib.asynccontextmanager
    async def hold(self, key: bytes, most: int) -> AsyncIterator[bool]:
        """A place of an API key."""
        number = next(self._numbers)
        try:
            yield (await self._ask(TakePlace(number, key, most))).is_done
        finally:
            self._send(GivePlace(number))

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _ask(self, message: Keep | Find | Forget | TakePlace) -> Answer:
        """Raises APIError if no answer comes."""
        if self._hangs:
            raise _no_answer()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[message.number] = answer
        try:
            self._send(message)
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            if not self._hangs:
                logger.error("the first HTTP process has not answered for %g s", ANSWER_S)
            self._hangs = True
            raise _no_answer() from None
        finally:
            del self._waiting[message.number]

    def _send(self, message: ToCoordinator) -> None:
        self._socket.send(msgspec.msgpack.encode(message))


def _no_answer() -> APIError:
    return unavailable("The server's first process does not answer.", "stalled")
