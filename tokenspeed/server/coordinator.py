"""The coordinator, in the first HTTP process: its siblings ask it for what it keeps, and are told
what it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tokenspeed.log import logger
from tokenspeed.server.coordinator_messages import (
    COORDINATOR,
    Answer,
    Find,
    FromCoordinator,
    GivePlace,
    Keep,
    Pong,
    Serving,
    TakePlace,
    ToCoordinator,
)
from tokenspeed.server.key_places import KeyCounts
from tokenspeed.server.response_store import Responses


class Coordinator:
    """Binds a socket in `folder`. `on_serving` is given the number of each sibling that begins to
    serve, `on_pong` that of each that says it lives. Lives on one event loop.
    """

    def __init__(
        self,
        folder: Path,
        responses: Responses,
        places: KeyCounts,
        on_serving: Callable[[int], None],
        on_pong: Callable[[int], None],
    ) -> None:
        self._responses, self._places = responses, places
        self._on_serving, self._on_pong = on_serving, on_pong
        self._held: dict[int, dict[int, bytes]] = {}
        """Of each sibling: the keys of its requests that have a place, by the requests' numbers."""
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{folder / COORDINATOR}")

    def tell(self, number: int, message: FromCoordinator) -> None:
        """To a sibling that is not there, nothing is said."""
        self._socket.send_multipart([str(number).encode(), msgspec.msgpack.encode(message)])

    def admit(self, number: int) -> None:
        """A sibling may take places from now on."""
        self._held[number] = {}

    def dismiss(self, number: int) -> None:
        """A sibling has ended: what it held is free, and what it said last is not heard."""
        for key in self._held.pop(number).values():
            self._places.give_back(key)

    async def serve(self) -> None:
        """Answer until cancelled."""
        decoder = msgspec.msgpack.Decoder(ToCoordinator)
        while True:
            sender, body = await self._socket.recv_multipart()
            try:
                await self._take(int(sender), decoder.decode(body))
            except Exception:
                logger.exception("what a sibling asked for failed")

    def close(self) -> None:
        self._context.destroy(linger=0)

    async def _take(self, sender: int, message: ToCoordinator) -> None:
        if isinstance(message, Serving):
            self._on_serving(sender)
        elif isinstance(message, Pong):
            self._on_pong(sender)
        elif isinstance(message, Keep):
            is_kept = await self._responses.put(message.id, message.answer, message.items)
            self.tell(sender, Answer(message.number, is_kept))
        elif isinstance(message, Find):
            stored = await self._responses.get(message.id)
            self.tell(sender, Answer(message.number, stored is not None, stored))
        elif isinstance(message, TakePlace):
            self._take_place(sender, message)
        elif isinstance(message, GivePlace):
            key = self._held.get(sender, {}).pop(message.number, None)
            if key is not None:
                self._places.give_back(key)
        else:
            is_forgotten = await self._responses.delete(message.id)
            self.tell(sender, Answer(message.number, is_forgotten))

    def _take_place(self, sender: int, asked: TakePlace) -> None:
        held = self._held.get(sender)
        if held is None:
            return
        is_taken = self._places.take(asked.key, asked.most)
        if is_taken:
            held[asked.number] = asked.key
        self.tell(sender, Answer(asked.number, is_taken))
