"""Calls written as a list of Python calls: [get_weather(city="Oslo"), now()], as Llama 4 does.

The list is all that the output begins with, or stands between <|python_start|> and <|python_end|>.
Arguments have names, and values that are Python literals: texts, numbers, True, False, None, lists,
tuples and dicts with texts as keys. They are turned into JSON as they come, and nothing is ever
evaluated. Format as in the models' chat templates.
"""

from __future__ import annotations

import json
import re

from tokenspeed.parsers.coerce import finite
from tokenspeed.parsers.events import Malformed
from tokenspeed.parsers.formats import Scene, ToolFormat, expect, next_is
from tokenspeed.parsers.json_text import MAX_DEPTH, MAX_WORD_CHARS
from tokenspeed.parsers.reader import Reader, Steps

MAX_NAME_CHARS = 256
_START, _END = "<|python_start|>", "<|python_end|>"
_BRACKETS = {"[": "]", "(": ")", "{": "}"}
_NAME = re.compile(r"[\w.-]*")
_PLAIN = {quote: re.compile(rf"[^{quote}\\]+") for quote in "\"'"}
_ESCAPE = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|[^xuU0-7])", re.DOTALL
)
_ESCAPE_BEGUN = re.compile(r"\\(?:x[0-9a-fA-F]?|u[0-9a-fA-F]{0,3}|U[0-9a-fA-F]{0,7}|[0-7]{1,2})?")
_MEANT = {
    **{"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": ""},
    **{char: char for char in "\\\"'"},
}
_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)(?:[eE][-+]?\d+)?", re.ASCII)
_WORD = re.compile(r"[-+.\w]+")
_WORDS = {
    **{"True": "true", "False": "false", "None": "null"},
    **{word: word for word in ("true", "false", "null")},
}


def _block(scene: Scene, opener: str) -> Steps[None]:
    reader = scene.reader
    yield from expect(reader, "[")
    yield from _call(scene)
    while (yield from expect(reader, ",", "]")) == ",":
        yield from _call(scene)
    reader.settle()
    yield from reader.skip_space()
    yield from reader.next_of(_END)
    reader.settle()


def _call(scene: Scene) -> Steps[None]:
    reader, output = scene.reader, scene.output
    name = yield from _name(reader, "(")
    output.start(name)
    reader.settle()
    separator = "{"
    while not (yield from _taken(reader, ")")):
        key = yield from _name(reader, "=")
        reader.settle()
        output.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        yield from _value(scene, 0)
        separator = ", "
        yield from _comma(reader, ")")
    output.arguments("{}" if separator == "{" else "}")
    output.end(is_complete=True)
    reader.settle()


def _name(reader: Reader, end: str) -> Steps[str]:
    """A name, and `end` behind it."""
    yield from reader.skip_space()
    while True:
        name = _NAME.match(reader.text, reader.at)
        if not name or name.end() - reader.at > MAX_NAME_CHARS:
            raise Malformed
        if name.end() < len(reader.text) or reader.is_closed:
            break
        yield
    reader.at = name.end()
    yield from expect(reader, end)
    return name[0]


def _taken(reader: Reader, char: str) -> Steps[bool]:
    """Whether `char` came next, behind white space; it has been read, if so."""
    found = yield from next_is(reader, char)
    reader.at += found
    return found


def _comma(reader: Reader, end: str) -> Steps[None]:
    """Between two entries of a list; there may be one before its `end`, which is not read."""
    if not (yield from _taken(reader, ",")) and not (yield from next_is(reader, end)):
        raise Malformed
    reader.settle()


def _value(scene: Scene, depth: int) -> Steps[None]:
    """One literal, written as JSON and settled."""
    reader, output = scene.reader, scene.output
    if depth > MAX_DEPTH or not (yield from reader.skip_space()):
        raise Malformed
    char = reader.text[reader.at]
    if char in "\"'":
        yield from _string(scene, char)
    elif char in _BRACKETS:
        yield from _items(scene, _BRACKETS[char], depth)
    else:
        output.arguments((yield from _word(reader)))
        reader.settle()


def _items(scene: Scene, end: str, depth: int) -> Steps[None]:
    """A list, tuple or dict, from its bracket to its `end`."""
    reader, output = scene.reader, scene.output
    reader.at += 1
    reader.settle()
    output.arguments("{" if end == "}" else "[")
    separator = ""
    while not (yield from _taken(reader, end)):
        output.arguments(separator)
        if end == "}":
            quote = "'" if (yield from next_is(reader, "'")) else '"'
            if not (yield from next_is(reader, quote)):
                raise Malformed
            yield from _string(scene, quote)
            yield from expect(reader, ":")
            reader.settle()
            output.arguments(": ")
        yield from _value(scene, depth + 1)
        separator = ", "
        yield from _comma(reader, end)
    reader.settle()
    output.arguments("}" if end == "}" else "]")


def _string(scene: Scene, quote: str) -> Steps[None]:
    """A text in quotes, from the first on. A line break in it is meant as one."""
    reader, output = scene.reader, scene.output
    reader.at += 1
    output.arguments('"')
    reader.settle()
    while (yield from reader.has_more()):
        plain = _PLAIN[quote].match(reader.text, reader.at)
        if reader.text[reader.at] == quote:
            reader.at += 1
            reader.settle()
            output.arguments('"')
            return
        if plain:
            reader.at, text = plain.end(), plain[0]
        else:
            text = yield from _escape(reader)
        reader.settle()
        output.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
    raise Malformed


def _escape(reader: Reader) -> Steps[str]:
    """What an escape stands for; one that stands for nothing is text."""
    while _ESCAPE_BEGUN.fullmatch(reader.text, reader.at) and not reader.is_closed:
        yield
    found = _ESCAPE.match(reader.text, reader.at)
    if not found:
        reader.at += 1
        return "\\"
    reader.at, body = found.end(), found[0][1:]
    if body[0] in "xuU":
        code = int(body[1:], 16)
    elif body[0] in "01234567":
        code = int(body, 8)
    else:
        return _MEANT.get(body, f"\\{body}")
    return chr(code) if code < 0x110000 and not 0xD800 <= code < 0xE000 else found[0]


def _word(reader: Reader) -> Steps[str]:
    """A number or a name as JSON; whole only where something else follows."""
    while True:
        word = _WORD.match(reader.text, reader.at)
        if not word or len(word[0]) > MAX_WORD_CHARS:
            raise Malformed
        if word.end() < len(reader.text) or reader.is_closed:
            break
        yield
    meant = _WORDS.get(word[0])
    if meant is None and _NUMBER.fullmatch(word[0]):
        meant = _json_number(word[0].replace("_", ""))
    if meant is None:
        raise Malformed
    reader.at = word.end()
    return meant


def _json_number(digits: str) -> str:
    """JSON wants digits at either side of a point, no plus, and no zeros before others."""
    try:
        return json.dumps(int(digits) if digits.lstrip("+-").isdigit() else finite(digits))
    except ValueError:  # infinite, or more digits than Python reads
        raise Malformed from None


PYTHONIC = ToolFormat(openers=(_START,), closers=(_END,), block=_block, bare_openers="[")
