"""The three answers to a flag that users of other engines type, as kinds of rows of one table.

A flag *works* (it is an option, or the same as one), is *granted otherwise* (one line says what is
done instead), or is *refused* (why, and the nearest thing that works). `table.py` is the table.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class Takes(enum.Enum):
    """How many words follow a flag."""

    NOTHING = "nothing"
    MAYBE = "maybe one"
    ONE = "one"
    OBJECT = "one, a JSON object; or each of its keys with a value"
    MANY = "many"


@dataclass(frozen=True, kw_only=True)
class Same:
    """Another spelling: these words are read in its place. `why` says what differs, if anything."""

    words: tuple[str, ...]
    why: str = ""


@dataclass(frozen=True, kw_only=True)
class Granted:
    """Taken; `why` says what is done instead."""

    why: str


@dataclass(frozen=True, kw_only=True)
class Refused:
    """Not taken; `why` says the reason and what works."""

    why: str


Answer = Same | Granted | Refused


@dataclass(frozen=True, kw_only=True)
class Known:
    """One row: a flag under all its names and its answer, which may depend on the value."""

    names: tuple[str, ...]
    takes: Takes
    answer: Answer
    values: tuple[str, ...] = ()
    """Values that are granted although `answer` refuses."""
    off: Answer | None = None
    """The answer to `--no-...`, for a switch."""

    def answer_to(self, words: Sequence[str]) -> Answer:
        if self.values and isinstance(self.answer, Refused) and set(words) <= set(self.values):
            return Granted(why=self.answer.why)
        if isinstance(self.answer, Same) and self.takes is not Takes.NOTHING:
            return Same(words=(*self.answer.words, *words), why=self.answer.why)
        return self.answer


def same(names: str, words: str, *, takes: Takes = Takes.NOTHING, why: str = "") -> Known:
    """A flag that stands for words of our own."""
    answer = Same(words=tuple(words.split()), why=why)
    return Known(names=tuple(names.split()), takes=takes, answer=answer)


def always(names: str, why: str) -> Known:
    """A switch for what is so anyway; its `--no-` form is refused."""
    off = Refused(why=why)
    return Known(names=tuple(names.split()), takes=Takes.NOTHING, answer=Granted(why=why), off=off)


def never(names: str, why: str) -> Known:
    """A switch for what does not exist; its `--no-` form is granted."""
    off = Granted(why=why)
    return Known(names=tuple(names.split()), takes=Takes.NOTHING, answer=Refused(why=why), off=off)


def either(names: str, why: str) -> Known:
    """A switch that changes nothing here, either way."""
    answer = Granted(why=why)
    return Known(names=tuple(names.split()), takes=Takes.NOTHING, answer=answer, off=answer)


def granted(names: str, why: str, takes: Takes = Takes.ONE) -> Known:
    """A flag with any value, granted."""
    return Known(names=tuple(names.split()), takes=takes, answer=Granted(why=why))


def only(names: str, values: str, why: str) -> Known:
    """A flag whose listed values are what happens anyway; any other is refused."""
    return Known(
        names=tuple(names.split()),
        takes=Takes.ONE,
        answer=Refused(why=why),
        values=tuple(values.split()),
    )


def refused(names: str, why: str, takes: Takes = Takes.ONE) -> Known:
    """A flag that is refused with any value."""
    return Known(names=tuple(names.split()), takes=takes, answer=Refused(why=why))


Table = Mapping[str, tuple[Known, ...]]
"""Rows under the headings that `--help=compat` prints."""
