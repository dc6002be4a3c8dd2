"""A response as it comes into being: what the model writes as items, and as the events of a stream.

A whole answer is made by the same steps; whoever wants no stream drops their events.
"""

from __future__ import annotations

import copy
import time
import uuid
from typing import Any, TypeVar

from tokenspeed.parsers.answer_events import AnswerEvents
from tokenspeed.parsers.events import (
    ArgumentsDelta,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tokenspeed.server.errors import APIError
from tokenspeed.server.generation import Piece, UsageCount
from tokenspeed.server.job import Job
from tokenspeed.server.logprobs import chat_logprobs
from tokenspeed.server.protocol_chat import ContentLogprob
from tokenspeed.server.protocol_response_events import (
    ArgumentsDone,
    ArgumentsPieceAdded,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDone,
    ReasoningPieceAdded,
    ResponseCompleted,
    ResponseCreated,
    ResponseEvent,
    ResponseFailed,
    ResponseIncomplete,
    ResponseInProgress,
    TextDone,
    TextPieceAdded,
)
from tokenspeed.server.protocol_responses import (
    FunctionCallItem,
    IncompleteDetails,
    InputDetails,
    MessageItem,
    OutputDetails,
    OutputItem,
    OutputTextPart,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseUsage,
)

E = TypeVar("E", bound=ResponseEvent)


class ResponseWriter:
    """Fills `response` with what the only sample of `job` becomes. One item is open at a time."""

    def __init__(self, response: Response, job: Job, *, one_call: bool, num_top: int) -> None:
        self.response = response
        self._job = job
        self._num_top = num_top
        self._parts = AnswerEvents(job.parser(), one_call=one_call)
        self._num_events = 0
        self._item: OutputItem | None = None
        self._pieces: list[str] = []
        self._entries: list[ContentLogprob] = []
        """Of the open message."""
        self._num_shown = 0
        """Of these, how many an event has shown."""
        self._finish_reason = ""

    def begin(self) -> list[ResponseEvent]:
        seen = copy.copy(self.response)
        return [
            self._event(ResponseCreated, response=seen),
            self._event(ResponseInProgress, response=seen),
        ]

    def piece(self, piece: Piece) -> list[ResponseEvent]:
        """What a piece adds."""
        new = piece.new
        if new.logprobs:
            shown = chat_logprobs(self._job.tokenizer, new.logprobs, self._num_top)
            self._entries += shown.content
        self._finish_reason = str(new.finish_reason or "")
        is_last = new.finish_reason is not None
        parts = self._parts.push_tokens(new.texts, len(new.token_ids), is_last=is_last)
        return [event for part in parts for event in self._part(part)]

    def end(self, count: UsageCount) -> list[ResponseEvent]:
        """The output is over: the last events, and the response as it stays."""
        response, usage = self.response, count.usage
        is_cut = self._finish_reason == "length"
        events = self._close("incomplete" if is_cut else "completed")
        if not response.output and not is_cut:
            events += [*self._begin_item(self._message()), *self._close("completed")]
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputDetails(usage.prompt_tokens_details.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputDetails(self._parts.num_reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        if is_cut:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
            return [*events, self._event(ResponseIncomplete, response=response)]
        response.status, response.completed_at = "completed", int(time.time())
        return [*events, self._event(ResponseCompleted, response=response)]

    def fail(self, error: APIError) -> list[ResponseEvent]:
        """The stream has begun and cannot go on."""
        events = self._close("incomplete")
        self.response.status, self.response.store = "failed", False
        self.response.error = ResponseError(error.code or "server_error", error.message)
        return [*events, self._event(ResponseFailed, response=self.response)]

    def _part(self, part: Event) -> list[ResponseEvent]:
        if isinstance(part, ReasoningDelta):
            opening = self._reasoning() if not isinstance(self._item, ReasoningItem) else None
            added = self._begin_item(opening)
            self._pieces.append(part.text)
            return [*added, self._in_item(ReasoningPieceAdded, delta=part.text)]
        if isinstance(part, ContentDelta):
            opening = self._message() if not isinstance(self._item, MessageItem) else None
            added = self._begin_item(opening)
            self._pieces.append(part.text)
            shown, self._num_shown = self._entries[self._num_shown :], len(self._entries)
            return [*added, self._in_item(TextPieceAdded, delta=part.text, logprobs=shown)]
        if isinstance(part, CallStart):
            call = FunctionCallItem(id=_new_id("fc"), call_id=part.id, name=part.name)
            return self._begin_item(call)
        if isinstance(part, ArgumentsDelta):
            self._pieces.append(part.text)
            return [self._in_item(ArgumentsPieceAdded, delta=part.text)]
        return self._close("completed" if part.is_complete else "incomplete")

    def _reasoning(self) -> OutputItem:
        return ReasoningItem(id=_new_id("rs"))

    def _message(self) -> OutputItem:
        return MessageItem(id=_new_id("msg"))

    def _begin_item(self, item: OutputItem | None) -> list[ResponseEvent]:
        """Close what is open and open `item`, if one is given."""
        if item is None:
            return []
        events = self._close("completed")
        self._item = item
        self.response.output = [*self.response.output, item]
        events.append(self._event(ItemAdded, output_index=self._index, item=copy.copy(item)))
        if isinstance(item, ReasoningItem):
            events.append(self._in_item(PartAdded, part=ReasoningText(text="")))
        elif isinstance(item, MessageItem):
            events.append(self._in_item(PartAdded, part=OutputTextPart(text="")))
        return events

    def _close(self, status: str) -> list[ResponseEvent]:
        """Close the open item, if there is one."""
        item, text = self._item, "".join(self._pieces)
        if item is None:
            return []
        events: list[ResponseEvent]
        item.status = status
        if isinstance(item, FunctionCallItem):
            item.arguments = text
            events = [self._in_item(ArgumentsDone, name=item.name, arguments=text)]
        elif isinstance(item, ReasoningItem):
            part = ReasoningText(text=text)
            item.content = [part]
            events = [
                self._in_item(ReasoningDone, text=text),
                self._in_item(PartDone, part=part),
            ]
        else:
            entries, self._entries, self._num_shown = self._entries, [], 0
            item.content = [OutputTextPart(text=text, logprobs=entries)]
            events = [
                self._in_item(TextDone, text=text, logprobs=entries),
                self._in_item(PartDone, part=item.content[0]),
            ]
        events.append(self._event(ItemDone, output_index=self._index, item=item))
        self._item, self._pieces = None, []
        return events

    @property
    def _index(self) -> int:
        """Of the open item."""
        return len(self.response.output) - 1

    def _in_item(self, kind: type[E], **fields: Any) -> E:
        assert self._item is not None
        return self._event(kind, item_id=self._item.id, output_index=self._index, **fields)

    def _event(self, kind: type[E], **fields: Any) -> E:
        event = kind(sequence_number=self._num_events, **fields)
        self._num_events += 1
        return event


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
