"""The text of one sample as the parts that a chat's answer has: reasoning, content and calls."""

from __future__ import annotations

from collections.abc import Sequence

from tokenspeed.outputs import AssistantMessage, ToolCall
from tokenspeed.parsers.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from tokenspeed.parsers.parser import OutputParser


class AnswerEvents:
    """Follows one sample; no `parser`, and all of it is content. With `one_call`, calls but the
    first are left out.

    Its text comes with `push` in any pieces, or with `push_tokens` token by token: then
    `num_reasoning_tokens` counts the tokens that showed nothing but reasoning, and those before
    them that showed nothing.
    """

    def __init__(self, parser: OutputParser | None, *, one_call: bool) -> None:
        self._parser = parser
        self._one_call = one_call
        self._num_pending = 0
        self.num_reasoning_tokens = 0
        self.has_calls = False
        """A call is complete."""

    def push(self, text: str, *, is_last: bool) -> list[Event]:
        """The events of the next text."""
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        return self._noted([*self._parse(text), *(self._close() if is_last else ())])

    def push_tokens(self, texts: Sequence[str], num_tokens: int, *, is_last: bool) -> list[Event]:
        """Those of the next tokens: a text for each, and maybe one that the end added."""
        if self._parser is None:
            return self.push("".join(texts), is_last=is_last)
        found: list[Event] = []
        for number, text in enumerate(texts):
            self._num_pending += number < num_tokens
            self._count(events := self._parse(text))
            found += events
        if is_last:
            self._count(events := self._close())
            found += events
        return self._noted(found)

    def _parse(self, text: str) -> list[Event]:
        return self._kept(self._parser.feed(text)) if self._parser else []

    def _close(self) -> list[Event]:
        return self._kept(self._parser.close()) if self._parser else []

    def _noted(self, events: list[Event]) -> list[Event]:
        self.has_calls |= any(isinstance(each, CallEnd) and each.is_complete for each in events)
        return merged(events)

    def _kept(self, events: list[Event]) -> list[Event]:
        if not self._one_call:
            return events
        return [event for event in events if getattr(event, "index", 0) == 0]

    def _count(self, events: list[Event]) -> None:
        if events:
            if all(isinstance(event, ReasoningDelta) for event in events):
                self.num_reasoning_tokens += self._num_pending
            self._num_pending = 0

    def finish_reason(self, reason: str) -> str:
        """An answer that was cut says so, whatever it holds."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason


def message_of(events: list[Event]) -> AssistantMessage:
    """What the events of a whole answer make up."""
    starts = [event for event in events if isinstance(event, CallStart)]
    arguments: list[list[str]] = [[] for _ in starts]
    complete = [False for _ in starts]
    for event in events:
        if isinstance(event, ArgumentsDelta):
            arguments[event.index].append(event.text)
        elif isinstance(event, CallEnd):
            complete[event.index] = event.is_complete
    calls = zip(starts, arguments, complete, strict=True)
    return AssistantMessage(
        content="".join(each.text for each in events if isinstance(each, ContentDelta)),
        reasoning="".join(each.text for each in events if isinstance(each, ReasoningDelta)),
        tool_calls=tuple(
            ToolCall(id=start.id, name=start.name, arguments="".join(pieces), is_complete=is_whole)
            for start, pieces, is_whole in calls
        ),
    )
