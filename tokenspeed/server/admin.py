"""What only whoever runs the server may ask for: to drop cached prefixes, end requests, hold and go
on, record what the engine does (`middleware.Authenticate` sees to that). And a route that is known
from other servers, and refused with the reason.
"""

from __future__ import annotations

from typing import Any

import msgspec

from tokenspeed.engine.messages import MAX_PROFILE_STEPS, Done
from tokenspeed.server.errors import bad_request, not_offered
from tokenspeed.server.protocol import RequestFields
from tokenspeed.server.state import ServerState

PROFILE_STEPS = 16
"""Where a request names no number."""


class Nothing(RequestFields, kw_only=True):
    """A request without fields."""


class AnyFields(RequestFields, kw_only=True):
    """A request that is refused whatever it holds."""

    takes_any = True

    input: Any = None


class AbortRequest(RequestFields, kw_only=True):
    """`rid` is the id that answers and their events carry."""

    rid: str | None = None
    abort_all: bool | None = None

    def check(self) -> None:
        if bool(self.rid) == bool(self.abort_all):
            raise bad_request("send either rid or abort_all: true", "rid")


class ProfileRequest(RequestFields, kw_only=True):
    """`num_steps` are recorded, fewer if that takes too much memory."""

    num_steps: int | None = None

    def check(self) -> None:
        if self.num_steps is not None and not 1 <= self.num_steps <= MAX_PROFILE_STEPS:
            raise bad_request(f"num_steps must be from 1 to {MAX_PROFILE_STEPS}", "num_steps")


class Flushed(msgspec.Struct, frozen=True):
    """Pages of each group of layers that have become free."""

    num_pages: int


class Aborted(msgspec.Struct, frozen=True):
    """Requests that were running or waiting, and have ended."""

    num_requests: int


class Profiled(msgspec.Struct, frozen=True):
    """Where the trace is, or will be, and how many steps are in it so far."""

    path: str
    num_steps: int


class Held(msgspec.Struct, frozen=True):
    is_paused: bool


async def flush_cache(state: ServerState, request: Nothing) -> Flushed:
    """Forget all prefixes that no request uses now."""
    return Flushed((await state.client.commands.ask("flush_cache")).num_pages)


async def abort_request(state: ServerState, request: AbortRequest) -> Aborted:
    """End requests: they are answered with an error, or their streams end with one."""
    return Aborted(await state.abort(None if request.abort_all else request.rid))


async def pause(state: ServerState, request: Nothing) -> Held:
    """Stop between two steps: requests keep their place, and new ones wait."""
    await state.client.commands.ask("pause")
    return Held(True)


async def go_on(state: ServerState, request: Nothing) -> Held:
    """Go on after a pause."""
    await state.client.commands.ask("continue")
    return Held(False)


async def start_profile(state: ServerState, request: ProfileRequest) -> Profiled:
    """Record the next steps of the engine."""
    num_steps = request.num_steps or PROFILE_STEPS
    return _profiled(await state.client.commands.ask("start_profile", num_steps=num_steps))


async def stop_profile(state: ServerState, request: Nothing) -> Profiled:
    """Write what has been recorded, unless that has been done."""
    return _profiled(await state.client.commands.ask("stop_profile"))


def _profiled(done: Done) -> Profiled:
    if done.profile is None:
        raise not_offered(f"profile: {done.refusal}")
    return Profiled(done.profile.path, done.profile.num_steps)


async def embeddings(state: ServerState, request: AnyFields) -> Held:
    """Refused."""
    raise not_offered("The model generates text; it makes no embeddings.")
