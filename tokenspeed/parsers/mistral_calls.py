"""Mistral's calls, behind marks that are tokens of their own.

    [TOOL_CALLS][{"name": NAME, "arguments": {...}, "id": ID}, ...]       before Mistral Small 3.2
    [TOOL_CALLS]NAME[CALL_ID]ID[ARGS]{...}                                repeated; [CALL_ID]ID may
                                                                          be missing
Formats as in the models' chat templates.
"""

from __future__ import annotations

from tokenspeed.constraint import ARGUMENTS, NAME, ToolCallFormat
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, next_is, object_call
from tokenspeed.parsers.json_calls import listed_calls
from tokenspeed.parsers.reader import Steps

MAX_HEAD_CHARS = 512
_CALLS, _ID, _ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


def _block(scene: Scene, opener: str) -> Steps[None]:
    reader = scene.reader
    for bracket in "[{":
        if (yield from next_is(reader, bracket)):
            yield from listed_calls(scene, opener)
            return
    head, is_whole = yield from reader.head(_ARGS, MAX_HEAD_CHARS)
    if not is_whole:
        raise Malformed
    name, _, call_id = head.partition(_ID)
    yield from object_call(scene, name.strip(), call_id.strip())
    reader.settle()


def _format(spelling: ToolCallFormat) -> ToolFormat:
    return ToolFormat(openers=(_CALLS,), inner=(_ID, _ARGS), block=_block, spelling=spelling)


MISTRAL = _format(
    ToolCallFormat(
        begin=f'{_CALLS}[{{"name":',
        call=(' "', NAME, '", "arguments": ', ARGUMENTS, "}"),
        separator=', {"name":',
        end="]",
    )
)
MISTRAL_ARGS = _format(ToolCallFormat(call=(_CALLS, NAME, _ARGS, ARGUMENTS)))
"""The same calls are read; those that a grammar forces are spelled as newer models do."""
