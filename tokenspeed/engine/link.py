"""The engine's end of the wire: a ROUTER socket, typed messages, and the clients behind it."""

from __future__ import annotations

import msgspec
import zmq

from tokenspeed.engine.messages import Attach, FromEngine, StepOutputs, ToEngine, Unread
from tokenspeed.log import logger

FIRST_CLIENT_MS = 30_000
LINGER_MS = 2_000
"""How long a closing socket may take to hand over what was sent last."""


class _Name(msgspec.Struct):
    id: str


class _Named(msgspec.Struct, tag="submit"):
    """A `Submit`, of which only the id can be read."""

    request: _Name


class EngineLink:
    """Not thread-safe. `clients` are the identities of those who attached and, as far as is known,
    are still there.

    Queues have no limit of their own: a client reads its socket all the time and keeps no more than
    its open requests can hold, and a dropped delta would corrupt a stream.
    """

    def __init__(self, address: str) -> None:
        self.clients: list[bytes] = []
        self._gone: set[bytes] = set()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set(zmq.SNDHWM, 0)
        self._socket.set(zmq.RCVHWM, 0)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)  # a send to a client that is gone says so
        self._socket.set(zmq.LINGER, LINGER_MS)
        self._socket.bind(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(ToEngine)
        self._id_decoder = msgspec.msgpack.Decoder(_Named)
        self._backlog: list[tuple[bytes, ToEngine | Unread]] = []
        self._news: FromEngine | None = None

    def wait_for_client(self) -> None:
        """Return when the first client has attached; raises TimeoutError if none does."""
        while not self.clients:
            if not self._socket.poll(FIRST_CLIENT_MS):
                raise TimeoutError("no client attached to the engine")
            self._drain()

    def receive(self, timeout_ms: int | None) -> list[tuple[bytes, ToEngine | Unread]]:
        """All messages that are here, after waiting up to `timeout_ms` (None: for ever) for one."""
        if not self._backlog:
            self._socket.poll(timeout_ms)
        self._drain()
        messages, self._backlog = self._backlog, []
        return messages

    def peek(self) -> list[ToEngine | Unread]:
        """What has come so far, left in place for `receive`."""
        self._drain()
        return [message for _, message in self._backlog]

    def send(self, client: bytes, message: FromEngine) -> bool:
        """Send; False, and the client is forgotten, if it is gone."""
        parts = message.packed().parts() if isinstance(message, StepOutputs) else (message,)
        try:
            for part in parts:
                self._socket.send_multipart([client, self._encoder.encode(part)])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            if client in self.clients:
                self.clients.remove(client)
                self._gone.add(client)
            return False
        return True

    def take_gone(self) -> set[bytes]:
        """Clients that were found to be gone since the last call."""
        gone, self._gone = self._gone, set()
        return gone

    def announce(self, message: FromEngine) -> None:
        """Send to everyone, and to whoever attaches later until there is other news."""
        self._news = message
        self._drain()
        for client in list(self.clients):
            self.send(client, message)

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def _drain(self) -> None:
        while self._socket.poll(0):
            client, *frames = self._socket.recv_multipart()
            message = self._read(b"".join(frames))
            if message is None:
                continue
            if not isinstance(message, Attach):
                self._backlog.append((client, message))
            elif client not in self.clients:
                self.clients.append(client)
                if self._news is not None:
                    self.send(client, self._news)

    def _read(self, body: bytes) -> ToEngine | Unread | None:
        """None for what nobody can be told of."""
        unreadable = (ValueError, RecursionError, msgspec.MsgspecError)
        try:
            return self._decoder.decode(body)
        except unreadable as error:
            logger.warning("a message cannot be read: %s", error)
            why = str(error)
        try:
            return Unread(self._id_decoder.decode(body).request.id, why)
        except unreadable:
            return None
