"""The parts of a model's output, and `Output`, which a grammar writes them with.

Adjacent pieces of one text are one text: where they are cut means nothing. White space around
reasoning, and between it, calls and content, is layout and is dropped; an answer that holds none of
these is kept to the character.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import msgspec


class Malformed(Exception):
    """The text is not what the grammar expects: what has not become an event yet is content."""


class ReasoningDelta(msgspec.Struct, frozen=True):
    text: str


class ContentDelta(msgspec.Struct, frozen=True):
    text: str


class CallStart(msgspec.Struct, frozen=True):
    """Call `index` (from 0) of the tool `name` begins; its arguments follow."""

    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """A piece of a call's arguments: joined, they are one JSON object if the call is complete."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The call's last event. One that was cut or broke off is not complete."""

    index: int
    is_complete: bool


Event = ReasoningDelta | ContentDelta | CallStart | ArgumentsDelta | CallEnd


def merged(events: list[Event]) -> list[Event]:
    """Adjacent pieces of one text joined."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
            found[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(last, ContentDelta) and isinstance(event, ContentDelta):
            found[-1] = ContentDelta(last.text + event.text)
        elif isinstance(last, ArgumentsDelta) and isinstance(event, ArgumentsDelta):
            found[-1] = ArgumentsDelta(last.index, last.text + event.text)
        else:
            found.append(event)
    return found


class Output:
    """Collects events. `tools` are the names that may be called; `new_id` names a call.

    `holds_space`: white space at the end of content waits for what follows, since it is dropped
    before a call. `only_calls`: there is no content, and what would be some is half a call.
    """

    def __init__(
        self,
        tools: Container[str],
        new_id: Callable[[], str],
        *,
        holds_space: bool,
        only_calls: bool = False,
    ) -> None:
        self.is_open = False
        """A call has started and not ended."""
        self._tools = tools
        self._new_id = new_id
        self._holds_space = holds_space
        self._only_calls = only_calls
        self._events: list[Event] = []
        self._ids: set[str] = set()
        self._index = -1
        self._space: list[str] = []
        """White space whose use what follows decides."""
        self._has_reasoning = False
        self._skips_space = False
        """Nothing but white space has come since reasoning or a call ended."""

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        text = text if self._has_reasoning else text.lstrip()
        kept = self._hold_space(text)
        if kept:
            self._has_reasoning = True
            self._events.append(ReasoningDelta(kept))

    def end_reasoning(self) -> None:
        self._space, self._skips_space = [], True

    def content(self, text: str) -> None:
        if self._only_calls:
            return
        text = text.lstrip() if self._skips_space else text
        kept = self._hold_space(text) if self._holds_space else text
        if kept:
            self._skips_space = False
            self._events.append(ContentDelta(kept))

    def _hold_space(self, text: str) -> str:
        """`text` and the white space held before it, without that at its end, which is held."""
        kept = text.rstrip()
        if kept:
            kept = "".join([*self._space, kept])
            self._space = []
        self._space.append(text[len(text.rstrip()) :])
        return kept

    def start(self, name: str, id: str = "") -> None:
        """Begin a call; a grammar gives an `id` if the model wrote one. Raises Malformed for a tool
        that was not offered.
        """
        if name not in self._tools:
            raise Malformed(name)
        if not id or id in self._ids:
            id = self._new_id()
        self._ids.add(id)
        self._space, self.is_open = [], True
        self._index += 1
        self._events.append(CallStart(self._index, id, name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self._index, text))

    def end(self, is_complete: bool) -> None:
        self._skips_space, self.is_open = True, False
        self._events.append(CallEnd(self._index, is_complete))

    def close(self) -> None:
        """The text is over: white space at the end of content is part of it."""
        if space := "".join(self._space):
            self._events.append(ContentDelta(space))
