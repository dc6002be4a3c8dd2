"""JSON as models write it: checked and passed on while it comes, never held as a whole.

What is passed on is valid JSON (RFC 8259). Three slips of models are mended on the way, since each
can mean one thing only: a raw line break or other control character in a string, a backslash that
escapes nothing ("\\d"), and Python's True, False and None.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable

from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.reader import Reader, Steps
from tokenspeed.text.unicode import is_unicode

MAX_DEPTH = 128
MAX_WORD_CHARS = 1024
_PLAIN = re.compile(r'[^"\\\x00-\x1f]+')
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_ESCAPE_BEGUN = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?", re.ASCII)
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9]\d*)(?:\.\d*|(?:\.\d+)?[eE][-+]?\d*)?)?", re.ASCII)
_WORD = re.compile(r"[-+.\w]+")
_SPACE = " \t\n\r"
_WORDS = {
    **{word: word for word in ("true", "false", "null")},
    **{"True": "true", "False": "false", "None": "null"},
}


class _Expect(enum.Enum):
    VALUE = enum.auto()
    FIRST_ITEM = enum.auto()
    FIRST_KEY = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    NEXT = enum.auto()


class _Scanner:
    """Follows one value. `is_done`: it is complete. `is_broken`: what comes next is no JSON."""

    def __init__(self) -> None:
        self.is_done = self.is_broken = False
        self._stack: list[str] = []
        """The closing brackets that are owed."""
        self._expect = _Expect.VALUE
        self._in_string = False

    def scan(self, text: str, at: int) -> tuple[int, str]:
        """Read from `at` as far as the text decides: the new place, and the JSON to pass on."""
        pieces: list[str] = []
        while at < len(text) and not self.is_done:
            step = self._string if self._in_string else self._structure
            end, piece = step(text, at)
            if end == at:  # undecided or broken
                break
            at = end
            pieces.append(piece)
        return at, "".join(pieces)

    def _string(self, text: str, at: int) -> tuple[int, str]:
        plain = _PLAIN.match(text, at)
        if plain:
            return plain.end(), plain[0]
        if text[at] == '"':
            self._in_string = False
            is_key = self._expect in (_Expect.KEY, _Expect.FIRST_KEY)
            self._expect = _Expect.COLON if is_key else self._after_value()
            return at + 1, '"'
        if text[at] != "\\":
            return at + 1, json.dumps(text[at])[1:-1]
        escape = _ESCAPE.match(text, at)
        if escape:
            return escape.end(), escape[0]
        if _ESCAPE_BEGUN.fullmatch(text, at):
            return at, ""
        return at + 1, "\\\\"

    def _structure(self, text: str, at: int) -> tuple[int, str]:
        char, expect = text[at], self._expect
        is_value = expect in (_Expect.VALUE, _Expect.FIRST_ITEM)
        if char in _SPACE:
            pass
        elif char == '"' and (is_value or expect in (_Expect.KEY, _Expect.FIRST_KEY)):
            self._in_string = True
        elif is_value and char in "{[" and len(self._stack) < MAX_DEPTH:
            self._stack.append("}" if char == "{" else "]")
            self._expect = _Expect.FIRST_KEY if char == "{" else _Expect.FIRST_ITEM
        elif self._may_close() and char == self._stack[-1]:
            self._stack.pop()
            self._expect = self._after_value()
        elif expect is _Expect.COLON and char == ":":
            self._expect = _Expect.VALUE
        elif expect is _Expect.NEXT and char == ",":
            self._expect = _Expect.KEY if self._stack[-1] == "}" else _Expect.VALUE
        elif is_value:
            return self._word(text, at)
        else:
            self.is_broken = True
            return at, ""
        return at + 1, char

    def _may_close(self) -> bool:
        opened = (_Expect.FIRST_ITEM, _Expect.FIRST_KEY, _Expect.NEXT)
        return bool(self._stack) and self._expect in opened

    def _word(self, text: str, at: int) -> tuple[int, str]:
        """A number or a name; whole only where something else follows."""
        word = _WORD.match(text, at)
        is_whole = word is not None and word.end() < len(text)
        if word is not None and not is_whole and len(word[0]) <= MAX_WORD_CHARS:
            return at, ""
        meant = None
        if word is not None and len(word[0]) <= MAX_WORD_CHARS:
            meant = word[0] if _NUMBER.fullmatch(word[0]) else _WORDS.get(word[0])
        if word is None or meant is None:
            self.is_broken = True
            return at, ""
        self._expect = self._after_value()
        return word.end(), meant

    def begun(self, rest: str) -> str:
        """What to pass on of an escape or a word in which the text ends: what may be gone on with
        as JSON, so that readers of unfinished JSON take it. "" if nothing is.
        """
        if self._in_string or _NUMBER_BEGUN.fullmatch(rest):
            return rest
        meant = (_WORDS[word] for word in _WORDS if word.startswith(rest))
        return next(meant, "")[: len(rest)]

    def _after_value(self) -> _Expect:
        self.is_done = not self._stack
        return _Expect.NEXT


def json_value(reader: Reader, write: Callable[[str], None], *, settles: bool) -> Steps[None]:
    """Read one JSON value and write it as it comes. Raises Malformed where it breaks off."""
    scanner = _Scanner()
    while True:
        reader.at, piece = scanner.scan(reader.text, reader.at)
        if settles:
            reader.settle()
        if piece:
            write(piece)
        if scanner.is_done:
            return
        if not scanner.is_broken and reader.is_closed:  # cut inside a word or an escape
            write(scanner.begun(reader.text[reader.at :]))
            reader.at = len(reader.text)
            if settles:
                reader.settle()
        if scanner.is_broken or reader.is_closed:
            raise Malformed
        yield


def read_json(reader: Reader) -> Steps[str]:
    """One JSON value, mended but not settled."""
    pieces: list[str] = []
    yield from json_value(reader, pieces.append, settles=False)
    return "".join(pieces)


def mended(text: str) -> str:
    """`text`, if it is one JSON value. Raises Malformed if not, or if it is not Unicode."""
    scanner = _Scanner()
    at, value = scanner.scan(text + " ", 0)
    if not scanner.is_done or text[at:].strip() or not is_unicode(text):
        raise Malformed
    return value
