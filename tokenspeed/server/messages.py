"""Anthropic's /v1/messages, and its /v1/messages/count_tokens: blocks in, blocks out.

A request is the chat request that its blocks mean, and is prepared and run as one. A last message
of the assistant is gone on with.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from tokenspeed.server import chat
from tokenspeed.server.errors import anthropic_body, as_api_error, told_as
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job
from tokenspeed.server.messages_answer import MessageWriter
from tokenspeed.server.messages_input import FIELD_NAMES, chat_request, prompt_request
from tokenspeed.server.protocol_messages import (
    CountTokensRequest,
    Message,
    MessagesRequest,
    TokenCount,
)
from tokenspeed.server.state import ServerState
from tokenspeed.server.stream import named_events, run_job, stream_job


async def prepare(state: ServerState, request: MessagesRequest) -> Job:
    """Raises APIError or InvalidRequest."""
    with told_as(FIELD_NAMES):
        return await chat.prepare(state, chat_request(request), prefix="msg_")


async def complete(state: ServerState, request: MessagesRequest, job: Job) -> Message:
    """Run the job to its end."""
    answer = _Answer(request, job)
    await run_job(state, job, answer)
    return answer.writer.message


async def stream(
    state: ServerState, request: MessagesRequest, job: Job
) -> AsyncGenerator[bytes, None]:
    """Run the job; yields blocks of events. A failure is the last event of its own."""
    async with contextlib.aclosing(stream_job(state, job, _Answer(request, job))) as blocks:
        try:
            async for block in blocks:
                yield block
        except Exception as error:
            shown = anthropic_body(as_api_error(error, "a stream"))
            yield b"event: error\ndata: " + shown + b"\n\n"


async def count_tokens(state: ServerState, request: CountTokensRequest) -> TokenCount:
    """Tokens of the prompt. Raises APIError or InvalidRequest."""
    with told_as(FIELD_NAMES):
        prompt = await chat.prompt(state, prompt_request(request))
    return TokenCount(len(prompt.ids))


class _Answer:
    """The events of a message's stream."""

    def __init__(self, request: MessagesRequest, job: Job) -> None:
        choice = request.tool_choice or {}
        self.writer = MessageWriter(job, one_call=bool(choice.get("disable_parallel_tool_use")))

    def start(self) -> bytes:
        return b""

    def piece(self, piece: Piece, count: UsageCount) -> bytes:
        return named_events(self.writer.piece(piece, count))

    async def end(self, count: UsageCount) -> bytes:
        return named_events(self.writer.end(count))
