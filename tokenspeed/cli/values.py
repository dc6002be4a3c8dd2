"""From what people write (words of a command line, a variable, YAML) to the values of options."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tokenspeed.options import ConfigError, Option

_SUFFIXES = {
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "K": 1 << 10,
    "M": 1 << 20,
    "G": 1 << 30,
    "T": 1 << 40,
}
"""Small letters count in thousands, capitals in powers of two: as vLLM reads them."""

_TRUTHS = {"true": True, "yes": True, "on": True, "1": True}
_TRUTHS |= {"false": False, "no": False, "off": False, "0": False}
_NOTHING = ("auto", "none", "null")
_MAX_DIGITS = 32


def from_words(option: Option, words: Sequence[str]) -> Any:
    """The value that words stand for; a single value needs exactly one. Raises ConfigError."""
    if option.is_list:
        value: Any = tuple(_entry(option, word) for word in _unpacked(option, words))
    elif len(words) != 1:
        raise ConfigError(f"takes one value, got {len(words)}")
    elif option.is_optional and words[0].lower() in _NOTHING:
        value = None
    else:
        value = _entry(option, words[0])
    option.check(value)
    return value


def _unpacked(option: Option, words: Sequence[str]) -> Sequence[str]:
    """Texts that are given as one JSON list, as vLLM takes them, one by one."""
    if option.kind is not str or len(words) != 1 or not words[0].startswith("["):
        return words
    try:
        entries = json.loads(words[0])
    except (ValueError, RecursionError):
        return words
    return entries if all(isinstance(each, str) for each in entries) else words


def from_yaml(option: Option, value: Any) -> Any:
    """The value of a YAML entry: YAML's own types, or text as on the command line."""
    if isinstance(value, list):
        return from_words(option, [_plain(entry) for entry in value])
    if isinstance(value, str):
        return from_words(option, [value])
    if option.is_list or (option.kind is str and value is not None):
        return from_words(option, [_plain(value)])
    option.check(value)
    return value


def _plain(value: Any) -> str:
    if value is None or isinstance(value, dict | list):
        raise ConfigError(f"cannot be {type(value).__name__}")
    return str(value)


def _entry(option: Option, word: str) -> Any:
    if option.kind is str:
        return word
    if option.kind is bool:
        if word.lower() not in _TRUTHS:
            raise ConfigError(f"must be true or false, got {word[:100]!r}")
        return _TRUTHS[word.lower()]
    scale = 1
    text = word
    if option.suffixes and word[-1:] in _SUFFIXES:
        text, scale = word[:-1], _SUFFIXES[word[-1]]
    try:
        if len(text) > _MAX_DIGITS:
            raise ValueError
        number = float(text) if option.kind is float or scale > 1 else int(text)
        whole = number * scale
        if option.kind is int and whole != int(whole):
            raise ValueError
    except (ValueError, OverflowError):
        kind = "a number" if option.kind is float else "a whole number"
        hint = ", such as 4096, 4k or 4K" if option.suffixes else ""
        raise ConfigError(f"must be {kind}{hint}; got {word[:100]!r}") from None
    return int(whole) if option.kind is int else whole
