"""The generation APIs as a table, and what is the same for all: from a JSON value to answers.

`answer` serves batch files and plain HTTP requests alike; the endpoint adds what HTTP needs.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from tokenspeed.server import chat, completions, messages, responses
from tokenspeed.server.answer_json import send_answer
from tokenspeed.server.asgi import read_json_body, until_disconnect
from tokenspeed.server.limits import check_limits
from tokenspeed.server.protocol import RequestFields, parse_json, parse_request
from tokenspeed.server.protocol_chat import ChatCompletion, ChatRequest
from tokenspeed.server.protocol_completions import Completion, CompletionRequest
from tokenspeed.server.protocol_messages import (
    Message,
    MessagesRequest,
)
from tokenspeed.server.protocol_responses import Response, ResponsesRequest
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import send_stream

R = TypeVar("R", bound=RequestFields)


class Prepared(Protocol):
    """What an API makes of a request: it has a place in the queue (`Job.place`)."""

    @property
    def place(self) -> contextlib.ExitStack: ...


J = TypeVar("J", bound=Prepared)


@dataclass(frozen=True, kw_only=True)
class Api(Generic[R, J]):
    """One generation API. `prepare` refuses what cannot be served, before anything is sent."""

    path: str
    summary: str
    request: type[R]
    answer: type[msgspec.Struct]
    prepare: Callable[[ServerState, R], Awaitable[J]]
    complete: Callable[[ServerState, R, J], Awaitable[msgspec.Struct]]
    stream: Callable[[ServerState, R, J], AsyncGenerator[bytes, None]]

    def parse(self, state: ServerState, value: Any) -> R:
        check_limits(state.config.server, value)
        strict = state.config.server.strict_fields
        return parse_request(value, self.request, strict=strict, warnings=state.field_warnings)

    async def create(self, state: ServerState, request: R) -> msgspec.Struct:
        """The whole answer to a request. Raises APIError, InvalidRequest or EngineDead."""
        job = await self.prepare(state, request)
        with job.place:
            return await self.complete(state, request, job)

    async def send(self, state: ServerState, request: R, send: Send) -> None:
        """The same as a stream of events. Raises before anything is sent, or not at all."""
        job = await self.prepare(state, request)
        with job.place:
            await send_stream(send, self.stream(state, request, job))


CHAT = Api(
    path="/v1/chat/completions",
    summary="Messages in, an assistant's message out",
    request=ChatRequest,
    answer=ChatCompletion,
    prepare=chat.prepare,
    complete=chat.complete,
    stream=chat.stream,
)
COMPLETIONS = Api(
    path="/v1/completions",
    summary="Text or token ids in, text out",
    request=CompletionRequest,
    answer=Completion,
    prepare=completions.prepare,
    complete=completions.complete,
    stream=completions.stream,
)
RESPONSES = Api(
    path="/v1/responses",
    summary="Items in, items out",
    request=ResponsesRequest,
    answer=Response,
    prepare=responses.prepare,
    complete=responses.complete,
    stream=responses.stream,
)
MESSAGES = Api(
    path="/v1/messages",
    summary="Anthropic's form: blocks in, blocks out",
    request=MessagesRequest,
    answer=Message,
    prepare=messages.prepare,
    complete=messages.complete,
    stream=messages.stream,
)
APIS: dict[str, Api[Any, Any]] = {api.path: api for api in (CHAT, COMPLETIONS, RESPONSES, MESSAGES)}


class ApiEndpoint:
    """An API over HTTP, as an ASGI application."""

    def __init__(self, state: ServerState, api: Api[Any, Any]) -> None:
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
                await until_disconnect(receive, api.send(state, request, send))
            else:
                answer = await until_disconnect(receive, api.create(state, request))
                await send_answer(send, answer)
