"""What an option is: a field of a settings class, with its help text and its limits.

Everything that lets a person set something is derived from it: command line flags, environment
variables, keys of a settings file, keywords of `LLM`, and the help of each.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_TEXT = 4096
MAX_LIST = 64


class ConfigError(ValueError):
    """A setting that cannot be taken: one line that says which, why, and what is allowed."""


def option(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[Any, ...] = (),
    low: float | None = None,
    high: float | None = None,
    secret: bool = False,
    suffixes: bool = False,
) -> Any:
    """A dataclass field with its help text, other flag names, allowed values or bounds. Lists are
    given as tuples. `suffixes` lets people write 4k (4000) or 4K (4096).
    """
    metadata = {
        "help": help,
        "aliases": aliases,
        "choices": choices,
        "low": low,
        "high": high,
        "secret": secret,
        "suffixes": suffixes,
    }
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One field of one settings class, as flags, files and help see it."""

    name: str
    kind: type
    """bool, int, float or str: of the value, or of each entry of a list."""
    is_list: bool
    is_optional: bool
    default: Any
    help: str
    aliases: tuple[str, ...]
    choices: tuple[Any, ...]
    low: float | None
    high: float | None
    secret: bool
    suffixes: bool

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def check(self, value: Any) -> None:
        """Raise ConfigError unless `value` may be held. NaN fails every bound."""
        if self.is_list:
            if not isinstance(value, tuple) or len(value) > MAX_LIST:
                shown = self._shown(value)
                raise ConfigError(f"must be a tuple of at most {MAX_LIST} entries, got {shown}")
            for entry in value:
                self._check_entry(entry)
        elif not (value is None and self.is_optional):
            self._check_entry(value)

    def _check_entry(self, value: Any) -> None:
        shown = self._shown(value)
        kinds = (int, float) if self.kind is float else (self.kind,)
        if type(value) not in kinds:
            raise ConfigError(f"must be {_KIND_NAMES[self.kind]}, got {shown}")
        if self.choices and value not in self.choices:
            allowed = ", ".join(str(choice) for choice in self.choices)
            raise ConfigError(f"must be one of: {allowed}; got {shown}")
        if isinstance(value, str) and not (0 < len(value) <= MAX_TEXT and value.isprintable()):
            raise ConfigError(f"must be 1 to {MAX_TEXT} printable characters")
        if self.low is None or self.high is None:
            return
        if not self.low <= value <= self.high:
            raise ConfigError(f"must be from {self.low} to {self.high}, got {shown}")

    def _shown(self, value: Any) -> str:
        return "a secret" if self.secret else repr(value)[:100]


_KIND_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}


def contradiction(first: str, second: str, ours: str) -> ConfigError:
    """Of two names that set one option to two values, where no order says which is meant."""
    return ConfigError(f"{second} contradicts {first}: give {ours} alone")


class Settings:
    """Base of the settings classes: a value outside its limits cannot be held, however it came."""

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            try:
                option.check(getattr(self, option.name))
            except ConfigError as error:
                raise ConfigError(f"{option.name} {error}") from None


def options_of(settings: type[Any]) -> tuple[Option, ...]:
    """The options of a settings class, in the order of its fields."""
    types = typing.get_type_hints(settings)
    found = []
    for field in dataclasses.fields(settings):
        arguments = typing.get_args(types[field.name])  # of tuple[str, ...] or int | None
        found.append(
            Option(
                name=field.name,
                kind=arguments[0] if arguments else types[field.name],
                is_list=typing.get_origin(types[field.name]) is tuple,
                is_optional=type(None) in arguments,
                default=field.default,
                **field.metadata,
            )
        )
    return tuple(found)


def suggest(name: str, known: Iterable[str]) -> str:
    """How an error about an unknown name ends: "; did you mean X?", or nothing. A name that has all
    words of another, or the reverse, is nearer than one that is spelled alike.
    """
    plain = {each.lstrip("-").lower().replace("_", "-"): each for each in known}
    asked = name.lstrip("-").lower().replace("_", "-")
    ranked = difflib.get_close_matches(asked, plain, n=len(plain) or 1, cutoff=_ALIKE)
    words = set(asked.split("-"))
    related = [each for each in plain if _shares_words(words, set(each.split("-")))]
    related = difflib.get_close_matches(asked, related, n=1, cutoff=0.0) or ranked
    return f"; did you mean {plain[related[0]]}?" if related else ""


_ALIKE = 0.65
"""Less, and two names have nothing to do with each other."""


def _shares_words(asked: set[str], known: set[str]) -> bool:
    """Whether one has all words of the other, and these are enough to mean something."""
    return len(shared := asked & known) > 1 and shared in (asked, known)


class Suggesting(msgspec.StructMeta):
    """Of structs that people write calls of: a field that there is none of gets the nearest name
    that there is.
    """

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        known = cls.__struct_fields__
        unknown = next((name for name in fields if name not in known), None)
        if unknown is not None:
            raise TypeError(f"{cls.__name__}() takes no {unknown!r}{suggest(unknown, known)}")
        return super().__call__(*args, **fields)
