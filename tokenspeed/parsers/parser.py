"""`OutputParser`: an output's text in, in any pieces, its parts out. One engine for all formats.

Whatever the text, nothing of it is lost but marks, layout and the JSON around a call: what is no
call after all is content, unless the output had to be one. A call that has begun to be passed on
cannot be taken back: if it breaks off, it ends incomplete, and the rest of it is content.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from tokenspeed.parsers import harmony
from tokenspeed.parsers.events import Event, Malformed, Output
from tokenspeed.parsers.formats import Scene, Schemas, ToolFormat
from tokenspeed.parsers.reader import Reader, Steps
from tokenspeed.parsers.thinking import Thinking


@dataclass(frozen=True, kw_only=True)
class OutputFormat:
    """What a model's outputs are made of. `thinking` None: no reasoning; `tools` None: no calls.
    `is_harmony`: messages that are both, and the other two are None.
    """

    thinking: Thinking | None = None
    tools: ToolFormat | None = None
    is_harmony: bool = False

    @property
    def markers(self) -> frozenset[str]:
        """All marks. Some of them are special tokens in a model's vocabulary, whose text a parser
        must be given all the same.
        """
        found: set[str] = set(harmony.MARKERS) if self.is_harmony else set()
        if self.thinking:
            found |= {self.thinking.open, self.thinking.close}
        if self.tools:
            found |= {*self.tools.openers, *self.tools.closers, *self.tools.inner}
        return frozenset(found)

    def is_open(self, prompt: str) -> bool:
        """Whether an output behind `prompt` begins with reasoning that is open already."""
        return self.thinking is not None and self.thinking.is_open(prompt)


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


class OutputParser:
    """`feed` and `close` return the events of one output, in order, whatever the cut of its text.

    `is_open`: it begins inside reasoning. `schemas` are the tools that may be called: none, and no
    calls are looked for. `only_calls`: it is held to be calls, so that what is none is a cut one,
    which is left out. A call without an id of the model's gets one from `new_id`.
    """

    def __init__(
        self,
        form: OutputFormat,
        *,
        is_open: bool = False,
        schemas: Schemas | None = None,
        only_calls: bool = False,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        offered = schemas or {}
        tools = form.tools if offered else None
        self._reader = Reader()
        self._output = Output(
            offered,
            new_id,
            holds_space=tools is not None or form.is_harmony,
            only_calls=only_calls,
        )
        scene = Scene(self._reader, self._output, offered)
        if form.is_harmony:
            self._steps = harmony.read_messages(scene)
        else:
            self._steps = _read(scene, form.thinking, tools, is_open=is_open)

    def feed(self, text: str) -> list[Event]:
        if text:
            self._reader.feed(text)
            next(self._steps)
        return self._output.take()

    def close(self) -> list[Event]:
        """The text is over. Nothing may be fed after it."""
        self._reader.is_closed = True
        for _ in self._steps:
            raise AssertionError("a grammar waits for text behind the end")
        self._output.close()
        return self._output.take()


def _read(
    scene: Scene, thinking: Thinking | None, tools: ToolFormat | None, *, is_open: bool
) -> Steps[None]:
    if thinking:
        yield from thinking.read(scene, tools, is_open=is_open)
    if tools is None:
        yield from scene.reader.until((), scene.output.content)
        return
    if tools.bare_openers:
        has_more = yield from scene.reader.skip_space()
        if has_more and scene.reader.text[scene.reader.at] in tools.bare_openers:
            yield from _block(scene, tools, "")
        scene.reader.rewind()
    while opener := (yield from scene.reader.until(tools.openers, scene.output.content)):
        yield from _block(scene, tools, opener)


def _block(scene: Scene, tools: ToolFormat, opener: str) -> Steps[None]:
    """Calls behind `opener`, or whatever it turns out to begin."""
    reader, output = scene.reader, scene.output
    begin = reader.num_settled
    try:
        yield from tools.block(scene, opener)
    except Malformed:
        if output.is_open:
            output.end(is_complete=False)
        reader.rewind()
        if opener and reader.num_settled == begin:
            reader.at += len(opener)
            output.content(reader.taken())
