"""The flags of a command: those of its options, its own, and those that other engines' users type.

The names are derived here, and each flag found on a command line (or key of a settings file) is
turned into an option's value, a note on what was granted otherwise, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenspeed.cli.scan import Given, scan
from tokenspeed.cli.values import from_words
from tokenspeed.options import ConfigError, Option, contradiction
from tokenspeed.peers.answers import Granted, Known, Refused, Same, Takes
from tokenspeed.peers.table import OBJECTS, PEER_VALUES, TABLE


@dataclass(frozen=True, kw_only=True)
class Command:
    """What one command takes: options, its own flags, and which parts of the table concern it."""

    options: tuple[Option, ...]
    own: Mapping[str, Takes]
    """An own flag that takes many words may be repeated. Where it is called as an option is, it
    stands in its place on the command line.
    """
    headings: tuple[str, ...] = tuple(TABLE)
    positional: str | None = None
    """Under which name positional words are kept with the own flags; None: they are the model."""
    is_unwatched: bool = False
    """Nobody watches its answers grow."""


def known_flags(headings: Iterable[str] = TABLE) -> dict[str, tuple[Known, bool]]:
    """Every flag under these headings of the table: its row, and whether it switches on."""
    rows = [row for heading in headings for row in TABLE[heading]]
    on = {name: (row, True) for row in rows for name in row.names}
    off = {negative(name): (row, False) for row in rows if row.off for name in row.names}
    return on | off


def negative(flag: str) -> str:
    return "--no-" + flag.removeprefix("--")


@dataclass(frozen=True)
class Read:
    """What a command line (or file) said: values of options with the words that gave them."""

    in_order: bool = True
    """Later words win, and lists grow. Where nothing comes later, in a file or an environment, two
    names of one option must agree.
    """
    values: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    swapped: list[str] = field(default_factory=list)
    """Those of the notes that another backend is used than was asked for."""
    own: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def put(self, option: Option, value: Any, source: str) -> None:
        """Set an option; ConfigError if that contradicts what was said, and nothing comes later."""
        if not self.in_order and self.values.get(option.name, value) != value:
            raise contradiction(self.sources[option.name], source, option.name)
        self.values[option.name] = value
        self.sources[option.name] = source


class Flags:
    """All flags of one command, by name."""

    def __init__(self, command: Command) -> None:
        self.own = command.own
        self.options: dict[str, tuple[Option, bool]] = {}
        for option in command.options:
            for name in (option.flag, *option.aliases):
                self.options[name] = (option, True)
            if option.kind is bool:
                self.options[negative(option.flag)] = (option, False)
        self.known = known_flags(command.headings)
        self.takes: dict[str, Takes] = {
            name: Takes.OBJECT if name in OBJECTS else row.takes
            for name, (row, _) in self.known.items()
        }
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
            before = read.own.get(given.flag, ()) if self.own[given.flag] is Takes.MANY else ()
            read.own[given.flag] = (*before, *given.words)
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
            if option.name == "attention_backend" and ours == "auto":
                read.swapped.append(read.notes[-1])
            words = (ours,)
        try:
            value = from_words(option, words)
            if option.is_list and read.in_order:
                value = (*read.values.get(option.name, ()), *value)
                option.check(value)
        except ConfigError as error:
            raise ConfigError(f"{given.typed} {error}") from None
        read.put(option, value, given.typed)

    def _answer(self, given: Given, read: Read) -> None:
        row, is_on = self.known[given.flag]
        answer = row.answer_to(given.words) if is_on else row.off
        shown = " ".join((given.typed, *given.words))[:200]
        match answer:
            case Refused():
                raise ConfigError(f"{shown} is not supported: {answer.why}")
            case Granted():
                read.notes.append(f"{shown}: {answer.why}")
                if given.flag.endswith("-backend") and not row.values:
                    read.swapped.append(read.notes[-1])
            case Same():
                if answer.why:
                    read.notes.append(f"{shown}: {' '.join(answer.words)}; {answer.why}")
                for meant in scan(answer.words, self.takes)[0]:
                    self.take(Given(meant.flag, given.typed, meant.words), read)


def _takes(option: Option, is_on: bool) -> Takes:
    if option.kind is bool:
        return Takes.MAYBE if is_on else Takes.NOTHING
    return Takes.MANY if option.is_list else Takes.ONE
