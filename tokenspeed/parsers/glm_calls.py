"""GLM's calls, from 4.5 on: pairs of tags for the names and the raw values of arguments.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

Line breaks between tags are layout, and GLM-4.7 leaves them out. Format as in the models' chat
templates.
"""

from __future__ import annotations

import json

from tokenspeed.parsers.coerce import parameter_types
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect
from tokenspeed.parsers.raw_values import ValueEnd, read_value
from tokenspeed.parsers.reader import Steps

MAX_NAME_CHARS = 256
_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"
_VALUE_ENDS = ValueEnd(followers={_VALUE_END: (_KEY, _CALL_END)})


def _block(scene: Scene, opener: str) -> Steps[None]:
    reader, output = scene.reader, scene.output
    name = yield from _name(scene, "<")
    reader.at -= 1
    output.start(name)
    reader.settle()
    separator = "{"
    while (yield from expect(reader, _KEY, _CALL_END)) == _KEY:
        key = yield from _name(scene, _KEY_END)
        yield from expect(reader, _VALUE)
        reader.settle()
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from read_value(scene, _VALUE_ENDS, parameter_types(scene.schemas[name], key))
        separator = ", "
    output.arguments("{}" if separator == "{" else "}")
    output.end(is_complete=True)
    reader.settle()


def _name(scene: Scene, end: str) -> Steps[str]:
    name, is_whole = yield from scene.reader.head(end, MAX_NAME_CHARS)
    if not is_whole:
        raise Malformed
    return name.strip()


GLM45 = ToolFormat(
    openers=(_CALL,),
    closers=(_CALL_END,),
    inner=(_KEY, _KEY_END, _VALUE, _VALUE_END),
    block=_block,
)
