"""A message as it comes into being: what the model writes as blocks, and as the events of a stream.

A whole answer is made by the same steps; whoever wants no stream drops their events.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec

from tokenspeed.parsers.answer_events import AnswerEvents
from tokenspeed.parsers.events import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job
from tokenspeed.server.protocol import Usage
from tokenspeed.server.protocol_messages import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputPiece,
    Message,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    TextBlock,
    TextPiece,
    ThinkingBlock,
    ThinkingPiece,
    ToolUseBlock,
)

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""Of a finish reason; a stop sequence that was found is a reason of its own."""


class MessageWriter:
    """Fills `message` with what the only sample of `job` becomes. One block is open at a time.

    The first event waits for the first piece, which tells how much of the prompt was cached.
    """

    def __init__(self, job: Job, *, one_call: bool) -> None:
        none = MessageUsage(input_tokens=0, cache_read_input_tokens=0, output_tokens=0)
        self.message = Message(id=job.id, model=job.model, content=[], usage=none)
        self._parts = AnswerEvents(job.parser(), one_call=one_call)
        self._has_begun = False
        self._block: Block | None = None
        self._pieces: list[str] = []
        self._finish_reason = ""
        self._stop_reason: str | int | None = None

    def piece(self, piece: Piece, count: UsageCount) -> list[MessageEvent]:
        """What a piece adds."""
        new = piece.new
        events: list[MessageEvent] = []
        if not self._has_begun:
            self._has_begun = True
            self.message.usage = _usage(count.usage)
            events.append(MessageStart(message=copy.copy(self.message)))
        self._finish_reason, self._stop_reason = str(new.finish_reason or ""), new.stop_reason
        is_last = new.finish_reason is not None
        for part in self._parts.push(new.text, is_last=is_last):
            events += self._part(part)
        return events

    def end(self, count: UsageCount) -> list[MessageEvent]:
        """The output is over: the last events, and the message as it stays."""
        events = self._close(is_complete=True)
        message = self.message
        message.usage = _usage(count.usage)
        message.stop_reason = STOP_REASONS[self._parts.finish_reason(self._finish_reason)]
        if message.stop_reason == "end_turn" and isinstance(self._stop_reason, str):
            message.stop_reason, message.stop_sequence = "stop_sequence", self._stop_reason
        stop = StopDelta(message.stop_reason, message.stop_sequence)
        return [*events, MessageDelta(delta=stop, usage=message.usage), MessageStop()]

    def _part(self, part: Event) -> list[MessageEvent]:
        if isinstance(part, ReasoningDelta):
            thought = ThinkingBlock(thinking="")
            begun = [] if isinstance(self._block, ThinkingBlock) else self._begin(thought)
            return [*begun, self._delta(ThinkingPiece(thinking=part.text), part.text)]
        if isinstance(part, ContentDelta):
            begun = [] if isinstance(self._block, TextBlock) else self._begin(TextBlock(text=""))
            return [*begun, self._delta(TextPiece(text=part.text), part.text)]
        if isinstance(part, CallStart):
            return self._begin(ToolUseBlock(id=part.id, name=part.name, input={}))
        if isinstance(part, ArgumentsDelta):
            return [self._delta(InputPiece(partial_json=part.text), part.text)]
        return self._close(is_complete=part.is_complete)

    @property
    def _index(self) -> int:
        """Of the open block."""
        return len(self.message.content) - 1

    def _begin(self, block: Block) -> list[MessageEvent]:
        events = self._close(is_complete=True)
        self._block = block
        self.message.content = [*self.message.content, block]
        return [*events, BlockStart(index=self._index, content_block=copy.copy(block))]

    def _delta(self, delta: TextPiece | ThinkingPiece | InputPiece, text: str) -> MessageEvent:
        self._pieces.append(text)
        return BlockDelta(index=self._index, delta=delta)

    def _close(self, *, is_complete: bool) -> list[MessageEvent]:
        """Close the open block, if there is one."""
        block, text = self._block, "".join(self._pieces)
        if block is None:
            return []
        if isinstance(block, TextBlock):
            block.text = text
        elif isinstance(block, ThinkingBlock):
            block.thinking = text
        elif is_complete:
            block.input = _object(text)
        self._block, self._pieces = None, []
        return [BlockStop(index=self._index)]


def _object(text: str) -> dict[str, Any]:
    """The arguments of a complete call, which are one JSON object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError):  # a number beyond a float, or nested too deeply
        return {}
    return value if isinstance(value, dict) else {}


def _usage(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
    )
