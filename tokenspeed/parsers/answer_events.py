"""The text of one sample as the parts that chat-like APIs show: reasoning, content and calls."""

from __future__ import annotations

from tokenspeed.parsers.events import CallEnd, ContentDelta, Event, ReasoningDelta
from tokenspeed.server.job import Job


class AnswerEvents:
    """Follows one sample of `job`. With `one_call`, calls but the first are left out.

    `num_reasoning_tokens` counts the tokens of pieces that showed nothing but reasoning.
    """

    def __init__(self, job: Job, *, one_call: bool) -> None:
        self._parser = job.new_parser() if job.new_parser else None
        self._one_call = one_call
        self._num_pending = 0
        self.num_reasoning_tokens = 0
        self.has_calls = False
        """A call is complete."""

    def push(self, text: str, num_tokens: int, *, is_last: bool) -> list[Event]:
        """The events of the next `num_tokens` tokens, whose text is `text`."""
        events = self._parse(text, is_last)
        self._num_pending += num_tokens
        if events:
            if all(isinstance(event, ReasoningDelta) for event in events):
                self.num_reasoning_tokens += self._num_pending
            self._num_pending = 0
        return events

    def finish_reason(self, reason: str) -> str:
        """An answer that was cut says so, whatever it holds."""
        return "tool_calls" if reason == "stop" and self.has_calls else reason

    def _parse(self, text: str, is_last: bool) -> list[Event]:
        if self._parser is None:
            return [ContentDelta(text)] if text else []
        events = self._parser.feed(text)
        if is_last:
            events += self._parser.close()
        if self._one_call:
            events = [event for event in events if getattr(event, "index", 0) == 0]
        self.has_calls |= any(isinstance(each, CallEnd) and each.is_complete for each in events)
        return events
