"""The flags of a command: those of its options, its own, and those that other engines' users type.

The names are derived here, and each flag found on a command line (or key of a settings file) is
turned into an option's value, a note on what was granted otherwise, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.cli.answers import Answer, Granted, Known, Refused, Same
from tokenspeed.cli.compat import PEER_VALUES, TABLE
from tokenspeed.cli.scan import Given, Takes, scan
from tokenspeed.cli.values import from_words
from tokenspeed.options import ConfigError, Option

KNOWN: dict[str, tuple[Known, bool]] = {
    **{name: (row, True) for rows in TABLE.values() for row in rows for name in row.names},
    **{
        "--no-" + name.removeprefix("--"): (row, False)
        for rows in TABLE.values()
        for row in rows
        for name in row.names
        if row.off
    },
}
"""Every flag of the table: its row, and whether it switches on."""


@dataclass(frozen=True)
class Read:
    """What a command line (or file) said: values of options with the words that gave them."""

    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)


class Flags:
    """All flags of one command: `options` and `own` are the command's, the table is everyone's."""

    def __init__(self, options: Iterable[Option], own: Mapping[str, Takes]) -> None:
        self.own = dict(own)
        self.options: dict[str, tuple[Option, bool]] = {}
        for option in options:
            for name in (option.flag, *option.aliases):
                self.options[name] = (option, True)
            if option.kind is bool:
                self.options["--no-" + option.flag.removeprefix("--")] = (option, False)
        self.takes: dict[str, Takes] = {name: known.takes for name, (known, _) in KNOWN.items()}
        for name, (option, is_on) in self.options.items():
            self.takes[name] = _takes(option, is_on)
        self.takes |= self.own

    def read(self, argv: list[str]) -> tuple[Read, list[str]]:
        """(what was said, positional words). Later words win; lists grow."""
        found, words = scan(argv, self.takes)
        read = Read()
        for given in found:
            self.take(given, read)
        return read, words

    def take(self, given: Given, read: Read) -> None:
        if given.flag in self.own:
            read.own[given.flag] = given.words
        elif given.flag in self.options:
            self._set(given, read)
        else:
            self._answer(given, read)

    def _set(self, given: Given, read: Read) -> None:
        option, is_on = self.options[given.flag]
        words = given.words or (str(is_on),)
        if len(words) == 1 and (option.name, words[0]) in PEER_VALUES:
            ours, meaning = PEER_VALUES[option.name, words[0]]
            read.notes.append(f"{given.typed} {words[0]}: {ours} is used; {meaning}")
            words = (ours,)
        try:
            value = from_words(option, words)
            if option.is_list:
                value = (*read.values.get(option.name, ()), *value)
                option.check(value)
        except ConfigError as error:
            raise ConfigError(f"{given.typed} {error}") from None
        read.values[option.name] = value
        read.sources[option.name] = given.typed

    def _answer(self, given: Given, read: Read) -> None:
        answer = answer_to(given)
        shown = " ".join((given.typed, *given.words))[:200]
        match answer:
            case Refused():
                raise ConfigError(f"{shown} is not supported: {answer.why}")
            case Granted():
                read.notes.append(f"{shown}: {answer.why}")
            case Same():
                if answer.why:
                    read.notes.append(f"{shown}: {' '.join(answer.words)}; {answer.why}")
                for meant in scan(answer.words, self.takes)[0]:
                    self.take(Given(meant.flag, given.typed, meant.words), read)


def answer_to(given: Given) -> Answer:
    """The table's answer to a flag with its words."""
    row, is_on = KNOWN[given.flag]
    if is_on:
        return row.answer_to(given.words)
    assert row.off is not None
    return row.off


def _takes(option: Option, is_on: bool) -> Takes:
    if option.kind is bool:
        return Takes.MAYBE if is_on else Takes.NOTHING
    return Takes.MANY if option.is_list else Takes.ONE
