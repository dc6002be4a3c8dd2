"""The two generation APIs as a table, and what is the same for both: from a JSON value to answers.

`answer` serves batch files and plain HTTP requests alike; the endpoint adds what HTTP needs.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from tokenspeed.server import chat, completions
from tokenspeed.server.asgi import read_json_body, send_json, until_disconnect
from tokenspeed.server.job import Job
from tokenspeed.server.limits import check_limits
from tokenspeed.server.protocol import SamplingFields, parse_json, parse_request
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_completions import CompletionRequest
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import send_stream

R = TypeVar("R", bound=SamplingFields)


@dataclass(frozen=True)
class Api(Generic[R]):
    """One generation API. `prepare` refuses what cannot be served, before anything is sent."""

    path: str
    request: type[R]
    prepare: Callable[[ServerState, R], Awaitable[Job]]
    complete: Callable[[ServerState, R, Job], Awaitable[msgspec.Struct]]
    stream: Callable[[ServerState, R, Job], AsyncGenerator[bytes, None]]

    def parse(self, state: ServerState, value: Any) -> R:
        check_limits(state.config.server, value)
        strict = state.config.server.strict_fields
        return parse_request(value, self.request, strict=strict, warnings=state.field_warnings)

    async def create(self, state: ServerState, request: R) -> msgspec.Struct:
        """The whole answer to a request. Raises APIError, InvalidRequest or EngineDead."""
        job = await self.prepare(state, request)
        with job.place:
            return await self.complete(state, request, job)


CHAT = Api("/v1/chat/completions", ChatRequest, chat.prepare, chat.complete, chat.stream)
COMPLETIONS = Api(
    "/v1/completions",
    CompletionRequest,
    completions.prepare,
    completions.complete,
    completions.stream,
)
APIS: dict[str, Api[Any]] = {api.path: api for api in (CHAT, COMPLETIONS)}


class ApiEndpoint:
    """An API over HTTP, as an ASGI application."""

    def __init__(self, state: ServerState, api: Api[Any]) -> None:
        self._state, self._api = state, api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, api = self._state, self._api
        limits = state.config.server
        state.require_ready()  # before a body is read that nobody can serve
        with state.serving():
            with state.bodies.share() as take:
                body = await read_json_body(scope, receive, limits, take)
                request = api.parse(state, parse_json(body))
                del body
            if request.stream:
                job = await api.prepare(state, request)
                with job.place:
                    blocks = api.stream(state, request, job)
                    await send_stream(receive, send, blocks)
            else:
                answer = await until_disconnect(receive, api.create(state, request))
                await send_json(send, msgspec.json.encode(answer))
