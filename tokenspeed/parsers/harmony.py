"""gpt-oss's harmony: an output is messages, whose headers say what each of them is.

    <|channel|>analysis<|message|>TEXT<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json
    <|message|>JSON<|call|>
    <|start|>assistant<|channel|>final<|message|>TEXT<|return|>

The prompt ends with <|start|>assistant. `analysis` is reasoning; a message to a function is a call,
wherever in its header the recipient stands; all else is content. Unknown words in a header mean
nothing, a missing end mark ends with the next message. Format as published with the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from tokenspeed.constraint import ARGUMENTS, NAME, ToolCallFormat
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, object_call
from tokenspeed.parsers.reader import Steps

MAX_HEAD_CHARS = 512
_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_CONSTRAIN = "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKERS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)
_HEAD_BEGINS = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, "to=")
_RECIPIENT = re.compile(r"\bto=functions\.([\w.-]+)", re.ASCII)
_ANALYSIS = re.compile(re.escape(_CHANNEL) + r"\s*analysis\b")

SPELLING = ToolCallFormat(
    call=(f"{_CHANNEL}commentary to=functions.", NAME, f" {_CONSTRAIN}json{_MESSAGE}", ARGUMENTS)
)
"""How a call is written that a grammar forces; there is one in an output."""


def read_messages(scene: Scene) -> Steps[None]:
    """All messages of an output. It may begin inside one, if the prompt opened it."""
    reader, output = scene.reader, scene.output
    has_content = False
    while (yield from reader.has_more()):
        head = yield from _head(scene)
        if found := _RECIPIENT.search(head):
            yield from _call(scene, found[1])
        if not found and _ANALYSIS.search(head):
            output.reasoning("\n")  # between messages: white space at the beginning is dropped
            yield from _body(scene, output.reasoning)
            output.end_reasoning()
        else:
            if head and has_content and (yield from reader.has_more()):
                output.content("\n")
            has_content = True
            yield from _body(scene, output.content)


def _head(scene: Scene) -> Steps[str]:
    """The next message's header, with its marks; "" if there is none. One that the end of the text
    cuts is read to the end: it holds nothing.
    """
    reader = scene.reader
    yield from reader.skip_space()
    begin = yield from reader.next_of(*_HEAD_BEGINS)
    if not begin:
        reader.rewind()
        return ""
    if begin == _MESSAGE:
        reader.settle()
        return begin
    try:
        head, _ = yield from reader.head(_MESSAGE, MAX_HEAD_CHARS)
    except Malformed:
        reader.rewind()
        yield from reader.skip_space()
        yield from reader.next_of(begin)
        scene.output.content(reader.taken())
        return ""
    reader.settle()
    return begin + head


def _call(scene: Scene, name: str) -> Steps[None]:
    """The call that a message is; what it holds besides is left for its body."""
    reader, output = scene.reader, scene.output
    try:
        yield from object_call(scene, name)
    except Malformed:
        if output.is_open:
            output.end(is_complete=False)
        reader.rewind()


def _body(scene: Scene, write: Callable[[str], None]) -> Steps[None]:
    """The rest of a message, and its end mark, if it has one."""
    mark = yield from scene.reader.until((*_ENDS, _START, _CHANNEL), write)
    if mark in _ENDS:
        scene.reader.settle()
    else:
        scene.reader.rewind()
