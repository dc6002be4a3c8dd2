"""Calls in a section of marks that are tokens of their own: Kimi K2's and DeepSeek's formats.

    kimik2: <|tool_calls_section_begin|>(<|tool_call_begin|>functions.NAME:INDEX
    <|tool_call_argument_begin|>JSON<|tool_call_end|>)+<|tool_calls_section_end|>
    deepseek31: <|tool_calls_begin|>(<|tool_call_begin|>NAME<|tool_sep|>JSON<|tool_call_end|>)+
    <|tool_calls_end|>, with U+FF5C for each bar and U+2581 for each underscore

What stands before Kimi's arguments is the call's id. DeepSeek V3 and R1 write `function` before the
separator and, behind it, NAME and the JSON in a fenced block. As in the models' chat templates.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.constraint import ARGUMENTS, NAME, NUMBER, ToolCallFormat
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect, next_is, object_call
from tokenspeed.parsers.reader import Steps

MAX_HEAD_CHARS = 512
_KIMI_ID = re.compile(r"(?:functions\.)?([\w.-]+?)(:\d+)?", re.ASCII)
_FENCE = "```"


@dataclass(frozen=True)
class _Section:
    """`call` reads one call, given what stands before the separator, where a forced call has
    `head`.
    """

    begin: str
    call_begin: str
    separator: str
    call_end: str
    end: str
    call: Callable[[Scene, str], Steps[None]]
    head: tuple[str, ...]

    def format(self) -> ToolFormat:
        return ToolFormat(
            openers=(self.begin, self.call_begin),
            closers=(self.end, self.call_end),
            inner=(self.separator,),
            block=self.block,
            spelling=ToolCallFormat(
                begin=self.begin,
                call=(self.call_begin, *self.head, self.separator, ARGUMENTS, self.call_end),
                end=self.end,
            ),
        )

    def block(self, scene: Scene, opener: str) -> Steps[None]:
        """A section, or calls without the mark before them. A call's end mark may be missing."""
        reader = scene.reader
        if opener == self.begin:
            yield from expect(reader, self.call_begin)
        mark = self.call_begin
        while mark == self.call_begin:
            head, is_whole = yield from reader.head(self.separator, MAX_HEAD_CHARS)
            if not is_whole:
                raise Malformed
            yield from self.call(scene, head.strip())
            reader.settle()
            mark = yield from expect(reader, self.call_end, self.call_begin, self.end)
            if mark == self.call_end:
                reader.settle()
                mark = yield from expect(reader, self.call_begin, self.end)
        reader.settle()


def _kimi_call(scene: Scene, head: str) -> Steps[None]:
    found = _KIMI_ID.fullmatch(head)
    if not found:
        raise Malformed
    yield from object_call(scene, found[1], head if found[2] else "")


def _deepseek_call(scene: Scene, head: str) -> Steps[None]:
    if (yield from next_is(scene.reader, "{")):
        yield from object_call(scene, head)
        return
    before, has_value = yield from scene.reader.head("{", MAX_HEAD_CHARS)
    name, _, language = before.rpartition(_FENCE)
    if head != "function" or not has_value or language.strip() != "json":
        raise Malformed
    scene.reader.at -= 1
    yield from object_call(scene, name.strip())
    yield from expect(scene.reader, _FENCE)


KIMIK2 = _Section(
    begin="<|tool_calls_section_begin|>",
    call_begin="<|tool_call_begin|>",
    separator="<|tool_call_argument_begin|>",
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    call=_kimi_call,
    head=("functions.", NAME, ":", NUMBER),
).format()

DEEPSEEK31 = _Section(
    begin="<\uff5ctool\u2581calls\u2581begin\uff5c>",
    call_begin="<\uff5ctool\u2581call\u2581begin\uff5c>",
    separator="<\uff5ctool\u2581sep\uff5c>",
    call_end="<\uff5ctool\u2581call\u2581end\uff5c>",
    end="<\uff5ctool\u2581calls\u2581end\uff5c>",
    call=_deepseek_call,
    head=(NAME,),
).format()
