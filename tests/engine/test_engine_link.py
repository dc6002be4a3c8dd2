"""The engine's side of its clients: whatever message does not reach one shows that it is gone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_tiny import request

from tokenspeed.engine.link import EngineLink
from tokenspeed.engine.messages import Attach, Command, Loading, Stats, Submit
from tokenspeed.engine.serving import Server
from tokenspeed.request import GenerateRequest, RequestDelta

WAIT_MS = 10_000


class RecordingEngine:
    """Takes requests and never answers them."""

    stats = Stats()

    def __init__(self) -> None:
        self.running: list[str] = []

    def add(self, spec: GenerateRequest) -> None:
        self.running.append(spec.id)

    def abort(self, ids: Iterable[str]) -> list[RequestDelta]:
        for id in ids:
            self.running.remove(id)
        return []

    def pause(self) -> None: ...


class Wire:
    """A server's link, and clients on it that come and go."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self.link = EngineLink(self.address)
        self.engine = RecordingEngine()
        self.server = Server(self.engine, self.link)  # type: ignore[arg-type]
        self.context = zmq.Context()
        self.sockets: list[zmq.Socket[bytes]] = []

    def client(self) -> zmq.Socket[bytes]:
        socket = self.context.socket(zmq.DEALER)
        self.sockets.append(socket)
        socket.connect(self.address)
        self.say(socket, Attach())
        return socket

    def say(self, socket: zmq.Socket[bytes], message: msgspec.Struct) -> None:
        socket.send(msgspec.msgpack.encode(message))

    def take(self, count: int) -> list[tuple[bytes, Any]]:
        """What comes, without attachments."""
        found: list[tuple[bytes, Any]] = []
        while len(found) < count:
            found += self.link.receive(WAIT_MS)
        return found

    def leave(self, socket: zmq.Socket[bytes]) -> None:
        """Returns when the server's side could know."""
        (client,) = self.link.clients
        socket.close()
        while self.link.send(client, Loading("still", "there")):
            pass
        # As if it had not been found out yet.
        self.link.take_gone()
        self.link.clients.append(client)


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    for socket in made.sockets:
        socket.close(linger=0)
    made.context.term()
    made.link.close()


@pytest.mark.parametrize("message", ["answer", "news", "figures"])
def test_whoever_cannot_be_reached_has_its_requests_ended(wire: Wire, message: str) -> None:
    lost = wire.client()
    wire.say(lost, Submit(request("lost-0", [5, 6])))
    if message == "answer":
        wire.say(lost, Command(0, "pause"))
    said = wire.take(2 if message == "answer" else 1)
    wire.server._handle(*said[0])
    wire.leave(lost)
    kept = wire.client()
    wire.say(kept, Submit(request("kept-0", [5, 6])))
    wire.server._handle(*wire.take(1)[0])
    assert wire.engine.running == ["lost-0", "kept-0"]
    if message == "answer":
        wire.link.send(said[1][0], Loading("an", "answer"))
    elif message == "news":
        wire.link.announce(Loading("some", "news"))
    wire.server._send()
    assert wire.engine.running == ["kept-0"]
    assert not wire.link.take_gone() and len(wire.link.clients) == 1
