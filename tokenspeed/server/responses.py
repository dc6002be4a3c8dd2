"""/v1/responses: items in, items out; answers can be kept, and gone on from.

A request is the chat request that its items mean, and is prepared and run as one.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from tokenspeed.server import chat
from tokenspeed.server.errors import APIError, as_api_error, bad_request, told_as, unsupported
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job
from tokenspeed.server.limits import check_messages
from tokenspeed.server.protocol_responses import (
    ReasoningOptions,
    Response,
    ResponsesRequest,
    TextOptions,
)
from tokenspeed.server.responses_answer import ResponseWriter
from tokenspeed.server.responses_input import FIELD_NAMES, as_items, chat_request
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import named_events, run_job, stream_job


@dataclass(frozen=True)
class ResponseJob:
    """A job, and `items`: all that the model is to see."""

    job: Job
    items: list[dict[str, Any]]

    @property
    def place(self) -> contextlib.ExitStack:
        return self.job.place


async def prepare(state: ServerState, request: ResponsesRequest) -> ResponseJob:
    """Raises APIError or InvalidRequest."""
    state.require_ready()
    if request.store and not state.shared.responses.is_on:
        raise unsupported("store", "this server keeps no responses (--response-store-bytes 0)")
    earlier, own = await _previous_items(state, request), as_items(request.input)
    items = [*earlier, *own]
    check_messages(state.config.server, len(items), "input", "with those of the responses before")
    with told_as(FIELD_NAMES):
        asked = chat_request(request, items, num_earlier=len(earlier))
        job = await chat.prepare(state, asked, prefix="resp_")
    if request.wants_logprobs and job.new_parser is not None:
        job.place.close()
        raise unsupported(
            "include",
            "this model's output is taken apart; /v1/chat/completions has the log-probabilities "
            "of all parts",
        )
    return ResponseJob(job, items)


async def complete(state: ServerState, request: ResponsesRequest, made: ResponseJob) -> Response:
    """Run the job to its end."""
    answer = _Answer(state, request, made)
    await run_job(state, made.job, answer)
    return answer.writer.response


async def stream(
    state: ServerState, request: ResponsesRequest, made: ResponseJob
) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of events. A failure is the last event of its own."""
    answer = _Answer(state, request, made)
    async with contextlib.aclosing(stream_job(state, made.job, answer)) as blocks:
        try:
            async for block in blocks:
                yield block
        except Exception as error:
            yield named_events(answer.writer.fail(as_api_error(error, "a stream")))


async def stored(state: ServerState, id: str) -> bytes:
    """A response that is kept, as JSON. Raises APIError."""
    found = await state.shared.responses.get(id)
    if found is None:
        raise _not_found(id)
    return found.answer


async def delete(state: ServerState, id: str) -> None:
    """Raises APIError if there is no such response."""
    if not await state.shared.responses.delete(id):
        raise _not_found(id)


def _not_found(id: str) -> APIError:
    return APIError(404, f"There is no response {id[:60]!r} (any more).", param="response_id")


async def _previous_items(state: ServerState, request: ResponsesRequest) -> list[dict[str, Any]]:
    """The items up to the end of the response that is gone on from."""
    if request.previous_response_id is None:
        return []
    found = await state.shared.responses.get(request.previous_response_id)
    if found is None:
        raise bad_request(
            f"previous_response_id: there is no response {request.previous_response_id[:60]!r} "
            "(any more); send all items",
            "previous_response_id",
            "previous_response_not_found",
        )
    return msgspec.json.decode(found.items, type=list[dict[str, Any]])


class _Answer:
    """The events of a response's stream; at its end the response is kept, unless that is unwanted.

    It is kept before its last event is sent, so that whoever has that one can go on.
    """

    def __init__(self, state: ServerState, request: ResponsesRequest, made: ResponseJob) -> None:
        self._store, self._items = state.shared.responses, made.items
        self.writer = ResponseWriter(
            _response(state, request, made.job),
            made.job,
            one_call=request.parallel_tool_calls is False,
            num_top=request.top_logprobs or 0,
        )

    def start(self) -> bytes:
        return named_events(self.writer.begin())

    def piece(self, piece: Piece, count: UsageCount) -> bytes:
        return named_events(self.writer.piece(piece))

    async def end(self, count: UsageCount) -> bytes:
        events = self.writer.end(count)
        response = self.writer.response
        if response.store:
            answer = msgspec.json.encode(response)
            items = msgspec.json.encode([*self._items, *response.output])
            response.store = await self._store.put(response.id, answer, items)
        return named_events(events)


def _response(state: ServerState, request: ResponsesRequest, job: Job) -> Response:
    """The response before anything is in it."""
    text = request.text or TextOptions()
    return Response(
        id=job.id,
        created_at=job.created,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=job.model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        reasoning=request.reasoning or ReasoningOptions(),
        store=request.store is not False and state.shared.responses.is_on,
        temperature=job.params.temperature,
        text=TextOptions(format=text.format or {"type": "text"}, verbosity=text.verbosity),
        tool_choice="auto" if request.tool_choice is None else request.tool_choice,
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=job.params.top_p,
        user=UNSET if request.user is None else request.user,
    )
