"""Reasoning between tags at the beginning of an output: <think>...</think>, or Kimi's older pair.

The prompt's end says whether the tag is open already, since templates open it (or write an empty
block to switch thinking off). Tags behind the beginning are text: an answer may speak about them.
Reasoning that the end of the output cuts stays reasoning.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenspeed.parsers.formats import Scene, ToolFormat
from tokenspeed.parsers.reader import Steps


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """`begins_inside`: models of this kind begin by reasoning, unless the prompt says otherwise."""

    open: str = "<think>"
    close: str = "</think>"
    begins_inside: bool = False

    def is_open(self, prompt: str) -> bool:
        """Whether an output that goes on behind `prompt` begins inside the tags."""
        end = prompt.rstrip()
        if end.endswith(self.open):
            return True
        return self.begins_inside and not end.endswith(self.close)

    def goes_on(self, text: str) -> bool:
        """Whether an assistant's message that is to be continued ends inside the tags."""
        return text.rfind(self.open) > text.rfind(self.close)

    def read(self, scene: Scene, tools: ToolFormat | None, *, is_open: bool) -> Steps[None]:
        """The reasoning, if the output begins with any."""
        reader, output = scene.reader, scene.output
        yield from reader.skip_space()
        if not (yield from reader.next_of(self.open)) and not is_open:
            reader.rewind()
            return
        reader.settle()
        openers = tools.openers if tools and tools.closers else ()
        while marker := (yield from reader.until((self.close, *openers), output.reasoning)):
            if marker == self.close:
                reader.settle()
                break
            if tools and (yield from self._ends_with_block(scene, tools, marker)):
                break
        output.end_reasoning()

    def _ends_with_block(self, scene: Scene, tools: ToolFormat, opener: str) -> Steps[bool]:
        """Calls have begun inside the reasoning. If the output ends behind them, the model forgot
        to close the tag and means them: they are read again. Else it thought of them, aloud.
        """
        reader = scene.reader
        ends = (self.close, opener, *tools.closers)
        marker = yield from reader.until(ends)
        while marker in tools.closers:
            if not (yield from reader.skip_space()):
                reader.rewind()
                return True
            marker = yield from reader.next_of(*tools.openers, *tools.closers)
            if marker in tools.openers:
                marker = yield from reader.until(ends)
        reader.at -= len(marker)
        scene.output.reasoning(reader.taken())
        return False
