"""Calls whose parameters are tags, with their values as raw text: Qwen3-Coder's format and its kin.

    <tool_call>                     <seed:tool_call>           <minimax:tool_call>
    <function=NAME>                 <function=NAME>            <invoke name="NAME">
    <parameter=KEY>                 <parameter=KEY>VALUE       <parameter name="KEY">VALUE
    VALUE
    </parameter>                    </parameter>               </parameter>
    </function>                     </function>                </invoke>
    </tool_call>                    </seed:tool_call>          </minimax:tool_call>

Qwen3-Coder's is also that of Qwen 3.5 and later, the others are Seed-OSS's and MiniMax-M2's. A call
holds any number of functions. Formats as in the models' chat templates.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from tokenspeed.parsers.coerce import parameter_types
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect
from tokenspeed.parsers.raw_values import ValueEnd, read_value
from tokenspeed.parsers.reader import Steps

MAX_NAME_CHARS = 256


@dataclass(frozen=True, kw_only=True)
class _Tags:
    """`name_end` closes the tags that begin a function and a parameter, behind their names."""

    call: str
    call_end: str
    function: str = "<function="
    function_end: str = "</function>"
    parameter: str = "<parameter="
    parameter_end: str = "</parameter>"
    name_end: str = ">"
    has_layout: bool = False

    @property
    def value_end(self) -> ValueEnd:
        return ValueEnd(
            followers={
                self.parameter_end: (self.parameter, self.function_end, self.call_end),
                self.function_end: (self.function, self.call_end),
            },
            outer=(self.function_end,),
            has_layout=self.has_layout,
        )

    def format(self) -> ToolFormat:
        return ToolFormat(
            openers=(self.call, self.function),
            closers=(self.call_end, self.function_end),
            inner=(self.parameter, self.parameter_end),
            block=self.block,
        )

    def block(self, scene: Scene, opener: str) -> Steps[None]:
        """Functions inside a call tag, or one whose call tag is missing."""
        reader = scene.reader
        if opener == self.call:
            yield from expect(reader, self.function)
        mark = self.function
        while mark == self.function:
            mark = yield from self._function(scene)
            reader.settle()
            if mark == self.function_end:
                mark = yield from expect(reader, self.call_end, self.function)
        reader.settle()

    def _function(self, scene: Scene) -> Steps[str]:
        """From the name to the end tag, which is returned: it may be that of the whole call."""
        reader, output = scene.reader, scene.output
        name = yield from self._name(scene)
        output.start(name)
        reader.settle()
        separator, marks = "{", (self.parameter, self.function_end, self.call_end)
        while (mark := (yield from expect(reader, *marks))) == self.parameter:
            key = yield from self._name(scene)
            reader.settle()
            output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            types = parameter_types(scene.schemas[name], key)
            yield from read_value(scene, self.value_end, types)
            separator = ", "
        output.arguments("{}" if separator == "{" else "}")
        output.end(is_complete=True)
        return mark

    def _name(self, scene: Scene) -> Steps[str]:
        name, is_whole = yield from scene.reader.head(self.name_end, MAX_NAME_CHARS)
        if not is_whole:
            raise Malformed
        return name.strip()


QWEN_CODER = _Tags(call="<tool_call>", call_end="</tool_call>", has_layout=True).format()
SEED_OSS = _Tags(call="<seed:tool_call>", call_end="</seed:tool_call>").format()
MINIMAX_M2 = _Tags(
    call="<minimax:tool_call>",
    call_end="</minimax:tool_call>",
    function='<invoke name="',
    function_end="</invoke>",
    parameter='<parameter name="',
    name_end='">',
).format()
