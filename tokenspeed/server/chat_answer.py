"""One sample of a chat answer: its parts as a whole message, or as the chunks of a stream.

Both are made of the same events. In a stream, log-probabilities and ids go with the first chunk
that their tokens give rise to; those of held-back text wait for the next one. So entries always add
up to `completion_tokens`.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from tokenspeed.parsers.answer_events import AnswerEvents, message_of
from tokenspeed.parsers.events import (
    ArgumentsDelta,
    CallEnd,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tokenspeed.request import TokenLogprob
from tokenspeed.server.generation import Piece
from tokenspeed.server.job import Job
from tokenspeed.server.logprobs import chat_logprobs
from tokenspeed.server.protocol_chat import (
    AssistantMessage,
    ChatChoice,
    ChatLogprobs,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from tokenspeed.server.protocol_tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from tokenspeed.text.output import Sample

REASONING_FIELDS = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}
"""Value of --reasoning-field -> fields of a message and of a delta."""


class ChatAnswer:
    """Follows the text of sample `index`. With parallel_tool_calls false, calls but the first are
    left out.
    """

    def __init__(self, request: ChatRequest, job: Job, index: int, reasoning_field: str) -> None:
        self._request = request
        self._job = job
        self._index = index
        self._reasoning_fields = REASONING_FIELDS[reasoning_field]
        self._parts = AnswerEvents(job.parser(), one_call=request.parallel_tool_calls is False)
        self._has_begun = False
        self._entries: list[TokenLogprob] = []
        self._ids: list[int] = []

    def choice(self, sample: Sample) -> ChatChoice:
        """The whole answer."""
        events = self._parts.push(sample.text, is_last=True)
        parts = message_of(events)
        calls = [
            ToolCall(id=call.id, function=FunctionCall(call.name, call.arguments))
            for call in parts.tool_calls
        ]
        message = AssistantMessage(
            content=parts.content if parts.content or not (parts.reasoning or calls) else None,
            tool_calls=calls or UNSET,
            **self._reasoning(parts.reasoning),
        )
        return ChatChoice(
            index=self._index,
            message=message,
            logprobs=self._logprobs(sample.logprobs),
            finish_reason=self._finish_reason(sample.finish_reason),
            stop_reason=sample.stop_reason,
            token_ids=sample.token_ids if self._request.return_token_ids else UNSET,
        )

    def chunks(self, piece: Piece) -> list[ChunkChoice]:
        """What a piece adds to a stream: a role first, a finish reason last."""
        new, is_last = piece.new, piece.new.finish_reason is not None
        self._entries += new.logprobs or []
        self._ids += new.token_ids
        chunks = [] if self._has_begun else [self._first()]
        deltas = [
            delta
            for event in self._parts.push(new.text, is_last=is_last)
            if (delta := self._delta(event)) is not None
        ]
        wants_tokens = self._request.return_token_ids or self._request.logprobs
        if not deltas and is_last and self._ids and wants_tokens:
            deltas = [Delta(content="")]
        chunks += map(self._chunk, deltas)
        if new.finish_reason is not None:
            chunks.append(
                ChunkChoice(
                    index=self._index,
                    delta=Delta(),
                    finish_reason=self._finish_reason(new.finish_reason),
                    stop_reason=new.stop_reason,
                )
            )
        return chunks

    def _finish_reason(self, reason: object) -> str:
        """As OpenAI has it: a call of the function that the request names ends with "stop"."""
        found = self._parts.finish_reason(str(reason))
        is_named = isinstance(self._request.tool_choice, dict)
        return "stop" if is_named and found == "tool_calls" else found

    def _first(self) -> ChunkChoice:
        self._has_begun = True
        return ChunkChoice(
            index=self._index,
            delta=Delta(role="assistant", content=""),
            prompt_token_ids=self._job.prompts[0].ids if self._request.return_token_ids else UNSET,
        )

    def _chunk(self, delta: Delta) -> ChunkChoice:
        """A chunk with all entries and ids that wait for one."""
        entries, self._entries = self._entries, []
        ids, self._ids = self._ids, []
        return ChunkChoice(
            index=self._index,
            delta=delta,
            logprobs=self._logprobs(entries),
            token_ids=ids if self._request.return_token_ids else UNSET,
        )

    def _delta(self, event: Event) -> Delta | None:
        if isinstance(event, ReasoningDelta):
            return Delta(**self._reasoning(event.text))
        if isinstance(event, ContentDelta):
            return Delta(content=event.text)
        if isinstance(event, CallEnd):
            return None
        if isinstance(event, ArgumentsDelta):
            call = ToolCallDelta(index=event.index, function=FunctionDelta(arguments=event.text))
        else:
            call = ToolCallDelta(
                index=event.index,
                id=event.id,
                type="function",
                function=FunctionDelta(name=event.name, arguments=""),
            )
        return Delta(tool_calls=[call])

    def _reasoning(self, text: str) -> dict[str, Any]:
        return dict.fromkeys(self._reasoning_fields, text) if text else {}

    def _logprobs(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        num_top = self._request.num_logprobs
        return None if num_top is None else chat_logprobs(self._job.tokenizer, entries, num_top)
