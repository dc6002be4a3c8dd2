"""One output through a parser, in any cuts, as merged events and as the parts that it has."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from tokenspeed.parsers.events import (
    ArgumentsDelta,
    CallEnd,
    CallStart,
    ContentDelta,
    Event,
    ReasoningDelta,
)
from tokenspeed.parsers.parser import OutputFormat, OutputParser

SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {"type": "object", "properties": {"city": {"type": "string"}}},
    "add": {
        "type": "object",
        "properties": {
            "a": {"type": "integer"},
            "b": {"type": "number"},
            "note": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "deep": {"anyOf": [{"type": "object"}, {"type": "null"}]},
            "sure": {"type": "boolean"},
        },
    },
    "now": {},
}


def parse(
    form: OutputFormat, pieces: Iterable[str], *, is_open: bool = False, offers: bool = True
) -> list[Event]:
    """Its events, adjacent texts merged."""
    numbers = itertools.count()
    parser = OutputParser(
        form,
        is_open=is_open,
        schemas=SCHEMAS if offers else {},
        new_id=lambda: f"call_{next(numbers)}",
    )
    events = [event for piece in pieces for event in parser.feed(piece)]
    merged: list[Event] = []
    for event in [*events, *parser.close()]:
        last = merged[-1] if merged else None
        if isinstance(last, ReasoningDelta) and isinstance(event, ReasoningDelta):
            merged[-1] = replace(last, text=last.text + event.text)
        elif isinstance(last, ContentDelta) and isinstance(event, ContentDelta):
            merged[-1] = replace(last, text=last.text + event.text)
        elif isinstance(last, ArgumentsDelta) and isinstance(event, ArgumentsDelta):
            assert last.index == event.index
            merged[-1] = replace(last, text=last.text + event.text)
        else:
            merged.append(event)
    return merged


@dataclass
class Parts:
    """`calls` are (name, arguments as text), `broken` the indices of those that did not end."""

    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)


def parts_of(events: list[Event]) -> Parts:
    """The parts; the order of a call's events and of the indices is checked."""
    parts = Parts()
    is_open = False
    for event in events:
        if isinstance(event, ReasoningDelta):
            assert not is_open and event.text
            parts.reasoning += event.text
        elif isinstance(event, ContentDelta):
            assert not is_open and event.text
            parts.content += event.text
        elif isinstance(event, CallStart):
            assert not is_open and event.index == len(parts.calls) and event.id not in parts.ids
            is_open = True
            parts.calls.append((event.name, ""))
            parts.ids.append(event.id)
        elif isinstance(event, ArgumentsDelta):
            assert is_open and event.index == len(parts.calls) - 1 and event.text
            name, text = parts.calls[-1]
            parts.calls[-1] = name, text + event.text
        else:
            assert isinstance(event, CallEnd)
            assert is_open and event.index == len(parts.calls) - 1
            is_open = False
            if not event.is_complete:
                parts.broken.append(event.index)
    assert not is_open
    return parts
