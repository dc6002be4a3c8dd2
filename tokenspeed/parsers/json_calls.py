"""Calls written as JSON: {"name": ..., "arguments": {...}}, in tags, after a tag, or bare.

hermes (also Qwen 2.5 and 3): <tool_call>{...}</tool_call>, repeated. llama3: [<|python_tag|>]{...},
joined by `;` or line breaks, with "parameters" for "arguments". json: an object, or a list of them,
that the output begins with. Formats as in the models' chat templates.
"""

from __future__ import annotations

import json

from tokenspeed.constraint import ARGUMENTS, NAME, ToolCallFormat
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect, next_is, object_call
from tokenspeed.parsers.json_text import mended, read_json
from tokenspeed.parsers.reader import Steps

_ARGUMENTS = ("arguments", "parameters")
_INERT = ("type", "id")
"""Keys that models add and that say nothing; any other shows that the object is no call."""


def _call(scene: Scene) -> Steps[None]:
    """One object. Arguments that stand before the name wait for it; without any, they are {}."""
    reader = scene.reader
    name = waiting = ""
    is_over = False
    yield from expect(reader, "{")
    while not is_over:
        key = yield from _string(scene)
        yield from expect(reader, ":")
        if key in _ARGUMENTS and not waiting:
            streams = bool(name) and (yield from next_is(reader, "{"))
            if streams:
                waiting = "{}"
                yield from object_call(scene, name)
            else:
                yield from reader.skip_space()
                waiting = _as_object((yield from read_json(reader)))
                if name:
                    _whole_call(scene, name, waiting)
        elif key == "name" and not name:
            name = yield from _string(scene)
            if waiting:
                _whole_call(scene, name, waiting)
        elif key in _INERT:
            yield from reader.skip_space()
            yield from read_json(reader)
        else:
            raise Malformed
        is_over = (yield from expect(reader, ",", "}")) == "}"
    if not waiting:
        _whole_call(scene, name, "{}")
    elif not name:
        raise Malformed
    reader.settle()


def _whole_call(scene: Scene, name: str, arguments: str) -> None:
    scene.output.start(name)
    scene.output.arguments(arguments)
    scene.output.end(is_complete=True)
    scene.reader.settle()


def _string(scene: Scene) -> Steps[str]:
    if not (yield from next_is(scene.reader, '"')):
        raise Malformed
    text: str = json.loads((yield from read_json(scene.reader)))
    return text


def _as_object(value: str) -> str:
    """Arguments as an object, which models also put into a string, or leave away as null."""
    if value.startswith('"'):
        value = mended(json.loads(value)).strip()
    if value == "null":
        return "{}"
    if not value.startswith("{"):
        raise Malformed
    return value


def _tagged(scene: Scene, opener: str) -> Steps[None]:
    yield from _call(scene)
    while (yield from next_is(scene.reader, "{")):
        yield from _call(scene)
    yield from expect(scene.reader, "</tool_call>")
    scene.reader.settle()


def _joined(scene: Scene, opener: str) -> Steps[None]:
    """The next object may stand behind a `;`, which is layout like the white space around it."""
    reader = scene.reader
    yield from _call(scene)
    while (yield from reader.skip_space()):
        yield from reader.next_of(";")
        reader.settle()
        if not (yield from next_is(reader, "{")):
            return
        yield from _call(scene)


def listed_calls(scene: Scene, opener: str) -> Steps[None]:
    if (yield from next_is(scene.reader, "{")):
        yield from _call(scene)
        return
    yield from expect(scene.reader, "[")
    yield from _call(scene)
    while (yield from expect(scene.reader, ",", "]")) == ",":
        yield from _call(scene)
    scene.reader.settle()


def _spelling(begin: str, arguments: str, separator: str, end: str) -> ToolCallFormat:
    """Objects with the name first; `begin` reaches to its key."""
    return ToolCallFormat(
        begin=begin,
        call=(' "', NAME, f'", "{arguments}": ', ARGUMENTS, "}"),
        separator=separator,
        end=end,
    )


HERMES = ToolFormat(
    openers=("<tool_call>",),
    closers=("</tool_call>",),
    block=_tagged,
    spelling=ToolCallFormat(
        begin="<tool_call>",
        call=('\n{"name": "', NAME, '", "arguments": ', ARGUMENTS, "}\n</tool_call>"),
        separator="\n<tool_call>",
    ),
)
LLAMA3 = ToolFormat(
    openers=("<|python_tag|>",),
    block=_joined,
    bare_openers="{",
    spelling=_spelling('{"name":', "parameters", '; {"name":', ""),
)
JSON = ToolFormat(
    openers=(),
    block=listed_calls,
    bare_openers="{[",
    spelling=_spelling('[{"name":', "arguments", ', {"name":', "]"),
)
