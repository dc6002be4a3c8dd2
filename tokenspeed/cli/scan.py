"""Cut a command line into flags with their values, and what is left. It decides no meaning."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tokenspeed.options import ConfigError, suggest
from tokenspeed.peers.answers import Takes


@dataclass(frozen=True)
class Given:
    """A flag as it was found: `flag` is its known name, `typed` what stood on the command line."""

    flag: str
    typed: str
    words: tuple[str, ...]


_LEVEL = re.compile(r"-O=?(\w+)$")
_NEGATIVE_NUMBER = re.compile(r"-\d*\.?\d+$")


def scan(argv: Sequence[str], flags: Mapping[str, Takes]) -> tuple[list[Given], list[str]]:
    """The flags in order, and the positional words.

    Taken: `--flag value`, `--flag=value`, `--flag_with_underscores`, `--json.key value` for a flag
    that takes an object, `-O2` for `-O 2`, and `--` before words that are no flags.
    """
    found: list[Given] = []
    rest: list[str] = []
    at = 0
    while at < len(argv):
        word = argv[at]
        at += 1
        if word == "--":
            return found, rest + list(argv[at:])
        if not _is_flag(word):
            rest.append(word)
            continue
        typed, flag, inline = _split(word, flags)
        takes = flags[flag]
        if inline is not None:
            found.append(Given(flag, typed, (inline,)))
            continue
        most = {Takes.ONE: 1, Takes.OBJECT: 1, Takes.MANY: len(argv)}.get(takes, 0)
        end = at
        while end < len(argv) and end - at < most and not _is_flag(argv[end]):
            end += 1
        if most and end == at:
            raise ConfigError(f"{typed} needs a value")
        found.append(Given(flag, typed, tuple(argv[at:end])))
        at = end
    return found, rest


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word[0] == "-" and not _NEGATIVE_NUMBER.match(word)


def _split(word: str, flags: Mapping[str, Takes]) -> tuple[str, str, str | None]:
    """(as typed, known name, value after "=" if any); an unknown flag is an error."""
    level = _LEVEL.match(word)
    if level and "-O" in flags:
        return "-O", "-O", level[1]
    typed, equals, value = word.partition("=")
    name = typed.replace("_", "-") if typed.startswith("--") else typed
    inline = value if equals else None
    if name in flags:
        if inline is not None and flags[name] is Takes.NOTHING:
            raise ConfigError(f"{typed} takes no value, got {value[:100]!r}")
        return typed, name, inline
    base = name.partition(".")[0]
    if base != name and flags.get(base) is Takes.OBJECT:
        return typed, base, inline
    raise ConfigError(f"unknown flag {typed[:100]}{suggest(name, flags)}")
