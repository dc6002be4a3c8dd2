"""What is asked with a JSON body and answered whole, without anything generated, as a table."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from tokenspeed.server import admin, messages, tokens
from tokenspeed.server.answer_json import send_answer
from tokenspeed.server.asgi import read_json_body, until_disconnect
from tokenspeed.server.limits import check_limits
from tokenspeed.server.protocol import RequestFields, parse_json, parse_request
from tokenspeed.server.protocol_chat import ChatRequest
from tokenspeed.server.protocol_completions import CompletionRequest
from tokenspeed.server.protocol_messages import CountTokensRequest, TokenCount
from tokenspeed.server.protocol_tokens import (
    DetokenizeRequest,
    RenderedPrompts,
    Text,
    TokenizeRequest,
    Tokens,
)
from tokenspeed.server.state import ServerState

R = TypeVar("R", bound=RequestFields)


@dataclass(frozen=True, kw_only=True)
class Call(Generic[R]):
    """A question with a JSON body that is answered whole. An empty body is an empty object."""

    path: str
    summary: str
    request: type[R]
    answer: type[msgspec.Struct] | None
    """None: it is refused."""
    run: Callable[[ServerState, R], Coroutine[Any, Any, Any]]
    is_admin: bool = False
    """Only whoever runs the server may ask."""


CALLS: tuple[Call[Any], ...] = (
    Call(
        path="/flush_cache",
        summary="Forget cached prefixes",
        request=admin.Nothing,
        answer=admin.Flushed,
        run=admin.flush_cache,
        is_admin=True,
    ),
    Call(
        path="/abort_request",
        summary="End one request, or all",
        request=admin.AbortRequest,
        answer=admin.Aborted,
        run=admin.abort_request,
        is_admin=True,
    ),
    Call(
        path="/pause_generation",
        summary="Launch no more steps",
        request=admin.Nothing,
        answer=admin.Held,
        run=admin.pause,
        is_admin=True,
    ),
    Call(
        path="/continue_generation",
        summary="Go on after a pause",
        request=admin.Nothing,
        answer=admin.Held,
        run=admin.go_on,
        is_admin=True,
    ),
    Call(
        path="/start_profile",
        summary="Record the engine's next steps",
        request=admin.ProfileRequest,
        answer=admin.Profiled,
        run=admin.start_profile,
        is_admin=True,
    ),
    Call(
        path="/stop_profile",
        summary="Write what has been recorded",
        request=admin.Nothing,
        answer=admin.Profiled,
        run=admin.stop_profile,
        is_admin=True,
    ),
    Call(
        path="/v1/embeddings",
        summary="Refused",
        request=admin.AnyFields,
        answer=None,
        run=admin.embeddings,
    ),
    Call(
        path="/tokenize",
        summary="Text or messages in, token ids out",
        request=TokenizeRequest,
        answer=Tokens,
        run=tokens.tokenize,
    ),
    Call(
        path="/detokenize",
        summary="Token ids in, text out",
        request=DetokenizeRequest,
        answer=Text,
        run=tokens.detokenize,
    ),
    Call(
        path="/v1/chat/completions/render",
        summary="The prompt of a chat request",
        request=ChatRequest,
        answer=RenderedPrompts,
        run=tokens.render_chat,
    ),
    Call(
        path="/v1/completions/render",
        summary="The prompts of a completion request",
        request=CompletionRequest,
        answer=RenderedPrompts,
        run=tokens.render_completion,
    ),
    Call(
        path="/v1/messages/count_tokens",
        summary="Tokens of a message's prompt",
        request=CountTokensRequest,
        answer=TokenCount,
        run=messages.count_tokens,
    ),
)


class CallEndpoint:
    """A call over HTTP, as an ASGI application."""

    def __init__(self, state: ServerState, call: Call[Any]) -> None:
        self._state, self._call = state, call

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state, call = self._state, self._call
        limits = state.config.server
        state.require_ready()  # before a body is read that nobody can serve
        with state.serving():
            with state.bodies.share() as take:
                body = await read_json_body(scope, receive, limits, take)
                value = parse_json(body or b"{}")
                check_limits(limits, value)
                request = parse_request(
                    value, call.request, strict=limits.strict_fields, warnings=state.field_warnings
                )
                del body, value
            answer: Any = await until_disconnect(receive, call.run(state, request))
            await send_answer(send, answer)
