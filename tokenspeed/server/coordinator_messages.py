"""What travels between the first HTTP process of a server and its siblings: typed msgpack over
ZeroMQ, never pickle.

The first binds a ROUTER socket, its coordinator's; each sibling connects a DEALER, known by its
number. The siblings' requests do not come here: those go to the engine.
"""

from __future__ import annotations

import msgspec

from tokenspeed.config import Config
from tokenspeed.engine.phases import Phase
from tokenspeed.server.response_store import StoredResponse

COORDINATOR, QUEUE = "coordinator", "queue"
"""Names in the folder that the processes of a server share; all else in it are their metrics."""


class Orders(msgspec.Struct, frozen=True, kw_only=True):
    """How a sibling is told what to be: one line of JSON on its stdin. It ends when that pipe
    closes.
    """

    number: int
    """Of this start: no two processes of a server have the same."""
    row: int
    """Its place among them, which is also its row of the queue's table."""
    config: Config
    folder: str
    engine: str
    """The engine's address."""
    family: int
    host: str
    port: int
    flow: tuple[int, ...] = ()
    """What an IPv6 address has besides: flow and scope."""
    created: int


class Serving(msgspec.Struct, tag="serving", frozen=True):
    """A sibling listens, and will answer."""


class Pong(msgspec.Struct, tag="pong", frozen=True):
    """To a `Ping`: the sibling's loop goes round."""


class Keep(msgspec.Struct, tag="keep", frozen=True):
    number: int
    id: str
    answer: bytes
    items: bytes


class Find(msgspec.Struct, tag="find", frozen=True):
    number: int
    id: str


class Forget(msgspec.Struct, tag="forget", frozen=True):
    number: int
    id: str


class TakePlace(msgspec.Struct, tag="take_place", frozen=True):
    """For a request with the API key of that digest, which has `most` places."""

    number: int
    key: bytes
    most: int


class GivePlace(msgspec.Struct, tag="give_place", frozen=True):
    """The request whose `TakePlace` had that number is over, whatever the answer was."""

    number: int


class Answer(msgspec.Struct, tag="answer", frozen=True):
    """To `Keep`, `Find`, `Forget` or `TakePlace` with that number: was it done, or there?"""

    number: int
    is_done: bool
    stored: StoredResponse | None = None


class Started(msgspec.Struct, tag="started", frozen=True):
    """The server's start is over; these were its phases."""

    phases: list[Phase]


class Ping(msgspec.Struct, tag="ping", frozen=True):
    """Say `Pong`."""


class Drain(msgspec.Struct, tag="drain", frozen=True):
    """Take nothing new, let what runs end, and end."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """End now."""


class Reload(msgspec.Struct, tag="reload", frozen=True):
    """Read the files again that SIGHUP is for."""


class EngineGone(msgspec.Struct, tag="engine_gone", frozen=True):
    """Its end shows on no socket: whoever started it knows."""

    message: str


class EngineLost(msgspec.Struct, tag="engine_lost", frozen=True):
    """It has ended, and another one will be there, at that address."""

    message: str
    address: str


ToCoordinator = Serving | Pong | Keep | Find | Forget | TakePlace | GivePlace
FromCoordinator = Answer | Started | Ping | Drain | Stop | Reload | EngineGone | EngineLost
