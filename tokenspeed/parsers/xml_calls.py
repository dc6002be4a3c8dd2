"""Qwen3-Coder's calls, also of Qwen 3.5 and later: parameters as tags, their values as raw text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

One line break at either end of a value is layout. A value may hold such tags itself, so an end tag
counts only where one follows that may. Strings are passed on as they come, other types when they
are whole. Format as in the models' chat templates.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from tokenspeed.parsers.coerce import coerce, parameter_types
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect
from tokenspeed.parsers.reader import Steps

MAX_NAME_CHARS = 256
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"


def _block(scene: Scene, opener: str) -> Steps[None]:
    """Functions inside a call tag, or one whose call tag is missing."""
    reader = scene.reader
    if opener == _CALL:
        yield from expect(reader, _FUNCTION)
    mark = _FUNCTION
    while mark == _FUNCTION:
        mark = yield from _function(scene)
        reader.settle()
        if mark == _FUNCTION_END:
            mark = yield from expect(reader, _CALL_END, _FUNCTION)
    reader.settle()


def _function(scene: Scene) -> Steps[str]:
    """From the name to the end tag, which is returned: it may be that of the whole call."""
    reader, output = scene.reader, scene.output
    name = yield from _name(scene)
    output.start(name)
    reader.settle()
    separator = "{"
    while (mark := (yield from expect(reader, _PARAMETER, _FUNCTION_END, _CALL_END))) == _PARAMETER:
        key = yield from _name(scene)
        reader.settle()
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(scene, parameter_types(scene.schemas[name], key))
        separator = ", "
    output.arguments("{}" if separator == "{" else "}")
    output.end(is_complete=True)
    return mark


def _name(scene: Scene) -> Steps[str]:
    name, is_whole = yield from scene.reader.head(">", MAX_NAME_CHARS)
    if not is_whole:
        raise Malformed
    return name.strip()


def _value(scene: Scene, types: frozenset[str]) -> Steps[None]:
    """One parameter's value and its end tag."""
    if types == {"string"}:
        scene.output.arguments('"')
        yield from _text(scene, lambda text: scene.output.arguments(_inside_string(text)))
        scene.output.arguments('"')
    else:
        pieces: list[str] = []
        yield from _text(scene, pieces.append)
        scene.output.arguments(coerce("".join(pieces), types))


def _text(scene: Scene, write: Callable[[str], None]) -> Steps[None]:
    """The raw text of a value, without its layout, up to its end tag or, if that is missing, to the
    function's. Raises Malformed if the text is over before.
    """
    reader, trim = scene.reader, _LastBreak(write)
    yield from reader.next_of("\n")
    reader.settle()
    while True:
        tag = yield from reader.until(tuple(_FOLLOWERS), trim.write)
        if not tag:
            trim.flush()
            raise Malformed
        is_last = not (yield from reader.skip_space())
        is_end = is_last or bool((yield from reader.next_of(*_FOLLOWERS[tag])))
        reader.rewind()
        if is_end and tag == _FUNCTION_END:
            return
        reader.at += len(tag)
        reader.settle()
        if is_end:
            return
        trim.write(tag)


_FOLLOWERS = {
    _PARAMETER_END: (_PARAMETER, _FUNCTION_END, _CALL_END),
    _FUNCTION_END: (_FUNCTION, _CALL_END),
}
"""End tags inside a value, and what stands behind one that does end it, if anything does."""


class _LastBreak:
    """Passes text on, but a line break at its end only when more comes."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._held = ""

    def write(self, text: str) -> None:
        text = self._held + text
        self._held = "\n" if text.endswith("\n") else ""
        self._write(text.removesuffix("\n"))

    def flush(self) -> None:
        self._write(self._held)


def _inside_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


QWEN_CODER = ToolFormat(
    openers=(_CALL, _FUNCTION),
    closers=(_CALL_END, _FUNCTION_END),
    inner=(_PARAMETER, _PARAMETER_END),
    block=_block,
)
