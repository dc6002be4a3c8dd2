"""An engine and its clients: what cannot be read is answered all the same, and who is gone by the
time of an answer harms nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_tiny import request

from tokenspeed.engine.link import EngineLink
from tokenspeed.engine.messages import (
    Abort,
    Attach,
    Command,
    FromEngine,
    Loading,
    Stats,
    StepOutputs,
    Submit,
)
from tokenspeed.engine.serving import Server
from tokenspeed.request import FinishReason, GenerateRequest, RequestDelta

WAIT_MS = 10_000


class Wire:
    """A server and a client, with as much of an engine between them as takes requests."""

    stats = Stats()

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.link = EngineLink(self.address)
        self.server = Server(self, self.link)  # type: ignore[arg-type]
        self.context = zmq.Context()
        self.client = self.context.socket(zmq.DEALER)
        self.client.connect(self.address)
        self.client.send(msgspec.msgpack.encode(Attach()))

    def add(self, spec: GenerateRequest) -> None:
        self.added.append(spec.id)

    def abort(self, ids: Iterable[str]) -> list[RequestDelta]:
        self.aborted += ids
        return []

    def pause(self) -> None: ...

    def ask(self, *frames: bytes) -> list[Any]:
        """The deltas that come of a message, and of a good request behind it."""
        good = f"good-{len(self.added)}"
        self.client.send_multipart(frames)
        self.client.send(msgspec.msgpack.encode(Submit(request(good, [5]))))
        while good not in self.added:
            for message in self.link.receive(WAIT_MS):
                self.server._handle(*message)
        self.stats = Stats(steps=self.stats.steps + 1)  # by which the last message is known
        self.server._send()
        deltas: list[Any] = []
        while True:
            assert self.client.poll(WAIT_MS)
            told = msgspec.msgpack.decode(self.client.recv(), type=FromEngine)
            assert isinstance(told, StepOutputs)
            deltas += told.deltas
            if told.stats == self.stats:
                return deltas


@pytest.fixture
def wire(tmp_path: Path) -> Iterator[Wire]:
    made = Wire(tmp_path)
    yield made
    made.context.destroy(linger=0)
    made.link.close()


def bodies() -> dict[str, Any]:
    """A request with each of its fields, and each sampling parameter, as what it cannot be."""
    good = msgspec.to_builtins(Submit(request("bad-0", [5, 6])))
    found = {}
    for name in set(GenerateRequest.__struct_fields__) - {"id"}:
        found[name] = good | {"request": good["request"] | {name: {"x": "y"}}}
    params = good["request"]["params"]
    for name in params:
        broken = params | {name: {"x": "y"}}
        found[f"params.{name}"] = good | {"request": good["request"] | {"params": broken}}
    found["params.n = 0"] = good | {"request": good["request"] | {"params": params | {"n": 0}}}
    return found


BODIES = bodies()


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_request_that_cannot_be_read_ends_with_an_error(wire: Wire, name: str) -> None:
    (delta,) = wire.ask(msgspec.msgpack.encode(BODIES[name]))
    assert (delta.request_id, delta.finish_reason) == ("bad-0", FinishReason.ERROR)
    assert "cannot be read" in delta.error and len(delta.error) < 500
    assert wire.added == ["good-0"], "it is not the engine's"


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\x81" * 5000],
        [b"x", b"y", b"z"],
        [msgspec.msgpack.encode({"type": "submit"})],
        [msgspec.msgpack.encode({"type": "submit", "request": {"id": 7}})],
        [msgspec.msgpack.encode({"type": "abort", "request_ids": 3})],
        [msgspec.msgpack.encode({"type": "unheard of"})],
    ],
)
def test_what_names_no_request_is_passed_over(wire: Wire, frames: list[bytes]) -> None:
    assert wire.ask(*frames) == [] and wire.added == ["good-0"]


@pytest.mark.parametrize("num_commands", [1, 2, 3])
def test_who_dies_before_its_answers_takes_nobody_along(wire: Wire, num_commands: int) -> None:
    """Its requests are ended, those of others go on, and the engine too."""
    wire.ask(msgspec.msgpack.encode(Submit(request("kept-0", [5]))))
    dying = wire.context.socket(zmq.DEALER)
    dying.connect(wire.address)
    messages = [Attach(), Submit(request("lost-0", [5]))]
    messages += [Command(number, "pause") for number in range(num_commands)]
    for message in messages:
        dying.send(msgspec.msgpack.encode(message))
    said: list[Any] = []
    while len(said) < len(messages) - 1:
        said += wire.link.receive(WAIT_MS)
    gone, _ = said[0]
    dying.close(linger=0)
    deadline = time.monotonic() + WAIT_MS / 1000
    while wire.link.send(gone, Loading("still", "there")):
        assert time.monotonic() < deadline
        assert not wire.link.receive(1)  # where ZeroMQ learns that it is gone
    for message in said:
        wire.server._handle(*message)
    wire.server._send()
    assert wire.aborted == ["lost-0"] and gone not in wire.link.clients
    assert wire.ask(msgspec.msgpack.encode(Abort([]))) == []
