"""Text that arrives in pieces, read by grammars that are generators.

A grammar asks for what comes next and waits (`yield`) where the text so far does not decide it. It
never looks at where a piece ends, so its answers depend on the text alone, however it was cut. Text
that was read and became an event is *settled*; what was read since is read again, as something
else, after a `rewind`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from tokenspeed.parsers.events import Malformed

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A grammar, or a part of one: yields where it waits for text."""

_SPACE = re.compile(r"\s*")


class Reader:
    """`text[at:]` is to be read next."""

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.is_closed = False
        self._settled = 0
        self._num_dropped = 0

    def feed(self, text: str) -> None:
        self.text = self.text[self._settled :] + text
        self._num_dropped += self._settled
        self.at -= self._settled
        self._settled = 0

    @property
    def num_settled(self) -> int:
        """Characters since the beginning."""
        return self._num_dropped + self._settled

    def settle(self) -> None:
        self._settled = self.at

    def rewind(self) -> None:
        self.at = self._settled

    def taken(self) -> str:
        """What was read and is not settled; now it is."""
        text = self.text[self._settled : self.at]
        self.settle()
        return text

    def has_more(self) -> Steps[bool]:
        """Wait until there is a character to read; False if the text is over."""
        while self.at == len(self.text):
            if self.is_closed:
                return False
            yield
        return True

    def skip_space(self) -> Steps[bool]:
        """Read white space; False if the text is over behind it."""
        while (yield from self.has_more()):
            space = _SPACE.match(self.text, self.at)
            self.at = space.end() if space else self.at
            if self.at < len(self.text):
                return True
        return False

    def next_of(self, *literals: str) -> Steps[str]:
        """Read the one of `literals` that comes next; "" if none does. None begins another."""
        longest = max(map(len, literals))
        while True:
            rest = self.text[self.at : self.at + longest]
            for literal in literals:
                if rest.startswith(literal):
                    self.at += len(literal)
                    return literal
            if self.is_closed or not any(literal.startswith(rest) for literal in literals):
                return ""
            yield

    def until(
        self, markers: tuple[str, ...], write: Callable[[str], None] | None = None
    ) -> Steps[str]:
        """Read up to the first of `markers` and over it; "" if the text is over before one comes.

        With `write`, the text before the marker is written, as it comes, and settled.
        """
        known = _known(markers)
        while True:
            found = known.whole.search(self.text, self.at)
            if found:
                stop = found.start()
            else:
                stop = len(self.text) if self.is_closed else known.begun(self.text, self.at)
            piece, self.at = self.text[self.at : stop], stop
            if write is not None:
                self.settle()
                if piece:
                    write(piece)
            if found:
                self.at = found.end()
                return found[0]
            if self.is_closed:
                return ""
            yield

    def head(self, marker: str, limit: int) -> Steps[tuple[str, bool]]:
        """The text before `marker`, which is read too, or what is left of the text and False.

        Raises Malformed if it is longer than `limit` characters. Nothing is settled.
        """
        while True:
            end = self.at + limit + len(marker)
            found = self.text.find(marker, self.at, end)
            is_over = self.is_closed or len(self.text) >= end
            stop = len(self.text) if found < 0 else found
            if is_over and stop - self.at > limit:
                raise Malformed
            if is_over or found >= 0:
                text = self.text[self.at : stop]
                self.at = stop if found < 0 else stop + len(marker)
                return text, found >= 0
            yield


@dataclass(frozen=True)
class _Markers:
    """Markers to look for. Each holds its first character once, so that none overlap."""

    whole: re.Pattern[str]
    markers: tuple[str, ...]

    def begun(self, text: str, start: int) -> int:
        """Where the longest end of `text` that could become a marker begins."""
        longest = max(map(len, self.markers), default=0)
        for at in range(max(start, len(text) - longest + 1), len(text)):
            end = text[at:]
            if any(marker.startswith(end) for marker in self.markers):
                return at
        return len(text)


@functools.lru_cache(maxsize=256)
def _known(markers: tuple[str, ...]) -> _Markers:
    assert all(marker.count(marker[0]) == 1 for marker in markers), markers
    # With no markers, a pattern that is found nowhere.
    return _Markers(re.compile("|".join(map(re.escape, markers)) or "(?!)"), markers)
