"""What a tool-call format is: how its calls begin, how they end, and the grammar of one block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.constraint import ToolCallFormat
from tokenspeed.parsers.events import Malformed, Output
from tokenspeed.parsers.json_text import json_value
from tokenspeed.parsers.reader import Reader, Steps

Schemas = Mapping[str, Mapping[str, Any]]
"""The tools that may be called: name -> JSON schema of the arguments."""


@dataclass(frozen=True)
class Scene:
    """What a grammar works with."""

    reader: Reader
    output: Output
    schemas: Schemas


@dataclass(frozen=True, kw_only=True)
class ToolFormat:
    """`block(scene, opener)` reads what follows one of `openers`, which is read and not settled. It
    raises Malformed where that is no call: what it did not settle is read again, as content.
    """

    openers: tuple[str, ...]
    closers: tuple[str, ...] = ()
    """The marks that end a block."""
    block: Callable[[Scene, str], Steps[None]]
    inner: tuple[str, ...] = ()
    """Marks inside blocks."""
    bare_openers: str = ""
    """Characters that begin a block where an output begins with them; they are not read."""
    spelling: ToolCallFormat | None = None
    """How calls are written that a grammar forces; None where no grammar can."""


def object_call(scene: Scene, name: str, id: str = "") -> Steps[None]:
    """A call whose arguments, a JSON object, come next; Malformed before it starts if none does."""
    reader, output = scene.reader, scene.output
    if not (yield from next_is(reader, "{")):
        raise Malformed
    output.start(name, id)
    yield from json_value(reader, output.arguments, settles=True)
    output.end(is_complete=True)


def expect(reader: Reader, *literals: str) -> Steps[str]:
    """One of `literals` behind white space; Malformed if something else comes."""
    yield from reader.skip_space()
    found = yield from reader.next_of(*literals)
    if not found:
        raise Malformed
    return found


def next_is(reader: Reader, char: str) -> Steps[bool]:
    """Whether `char` comes next, behind white space."""
    has_more = yield from reader.skip_space()
    return has_more and reader.text[reader.at] == char
