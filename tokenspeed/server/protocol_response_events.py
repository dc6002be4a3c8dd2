"""The events of a response's stream as typed structs, each with its name and number."""

from __future__ import annotations

import msgspec

from tokenspeed.server.protocol_chat import ContentLogprob
from tokenspeed.server.protocol_responses import (
    OutputItem,
    OutputTextPart,
    ReasoningText,
    Response,
)


class ResponseEvent(msgspec.Struct, tag_field="type", kw_only=True):
    sequence_number: int


class ResponseCreated(ResponseEvent, tag="response.created", kw_only=True):
    response: Response


class ResponseInProgress(ResponseEvent, tag="response.in_progress", kw_only=True):
    response: Response


class ResponseCompleted(ResponseEvent, tag="response.completed", kw_only=True):
    response: Response


class ResponseIncomplete(ResponseEvent, tag="response.incomplete", kw_only=True):
    response: Response


class ResponseFailed(ResponseEvent, tag="response.failed", kw_only=True):
    response: Response


class ItemAdded(ResponseEvent, tag="response.output_item.added", kw_only=True):
    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, tag="response.output_item.done", kw_only=True):
    output_index: int
    item: OutputItem


class _InItem(ResponseEvent, kw_only=True):
    item_id: str
    output_index: int


class _InPart(_InItem, kw_only=True):
    content_index: int = 0


class PartAdded(_InPart, tag="response.content_part.added", kw_only=True):
    part: OutputTextPart | ReasoningText


class PartDone(_InPart, tag="response.content_part.done", kw_only=True):
    part: OutputTextPart | ReasoningText


class TextPieceAdded(_InPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[ContentLogprob]


class TextDone(_InPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[ContentLogprob]


class ReasoningPieceAdded(_InPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(_InPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


class ArgumentsPieceAdded(_InItem, tag="response.function_call_arguments.delta", kw_only=True):
    delta: str


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done", kw_only=True):
    name: str
    arguments: str
