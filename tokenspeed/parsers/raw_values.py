"""Values of arguments that models write as raw text between tags, as JSON of the schema's types.

A value may hold such tags itself, so an end tag counts only where something follows that may.
Strings are passed on as they come, other types when they are whole.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenspeed.parsers.coerce import coerce
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene
from tokenspeed.parsers.reader import Steps


@dataclass(frozen=True, kw_only=True)
class ValueEnd:
    """`followers`: end tags, and what stands behind one that does end a value, if anything does.
    Those of `outer` are left to be read: they end what the value is in, since its own is missing.
    `has_layout`: one line break at either end of a value is layout.
    """

    followers: Mapping[str, tuple[str, ...]]
    outer: tuple[str, ...] = ()
    has_layout: bool = False


def read_value(scene: Scene, end: ValueEnd, types: frozenset[str]) -> Steps[None]:
    """One value and its end tag, written as arguments. Malformed if the text is over before."""
    if types == {"string"}:
        scene.output.arguments('"')
        yield from _text(scene, end, lambda text: scene.output.arguments(_inside_string(text)))
        scene.output.arguments('"')
    else:
        pieces: list[str] = []
        yield from _text(scene, end, pieces.append)
        scene.output.arguments(coerce("".join(pieces), types))


def _text(scene: Scene, end: ValueEnd, write: Callable[[str], None]) -> Steps[None]:
    reader, trim = scene.reader, _LastBreak(write, is_on=end.has_layout)
    if end.has_layout:
        yield from reader.next_of("\n")
        reader.settle()
    while True:
        tag = yield from reader.until(tuple(end.followers), trim.write)
        if not tag:
            trim.flush()
            raise Malformed
        is_last = not (yield from reader.skip_space())
        is_end = is_last or bool((yield from reader.next_of(*end.followers[tag])))
        reader.rewind()
        if is_end and tag in end.outer:
            return
        reader.at += len(tag)
        reader.settle()
        if is_end:
            return
        trim.write(tag)


class _LastBreak:
    """Passes text on, but, if `is_on`, a line break at its end only when more comes."""

    def __init__(self, write: Callable[[str], None], *, is_on: bool) -> None:
        self._write = write
        self._held = ""
        self._is_on = is_on

    def write(self, text: str) -> None:
        if not self._is_on:
            self._write(text)
            return
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._write(text.removesuffix("\n"))

    def flush(self) -> None:
        self._write(self._held)


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
