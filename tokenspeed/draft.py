"""A config on its way from what was given to what holds, with the reason for each value."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.config import GROUPS, OPTIONS, Config
from tokenspeed.options import options_of

_GROUP_OF = {each.name: group for group in GROUPS for each in options_of(GROUPS[group])}


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """A settled config. `reasons`: why each value that was open is what it is, or why it is open
    still. `notes`: what was asked for and has no effect, a line each.
    """

    config: Config
    reasons: Mapping[str, str]
    notes: Sequence[str] = ()

    def is_given(self, name: str) -> bool:
        return name not in self.reasons


class Draft:
    """A config that is being settled, with reasons."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._values: dict[str, Any] = {}
        self._reasons: dict[str, str] = {}
        self.notes: list[str] = []

    def value(self, name: str) -> Any:
        held = getattr(getattr(self.config, _GROUP_OF[name]), name)
        return self._values.get(name, held)

    def settle(self, name: str, open_value: Any, value: Any, reason: str) -> None:
        """Take `value` where nothing was given."""
        if self.value(name) == open_value:
            self._values[name], self._reasons[name] = value, reason

    def leave(self, name: str, open_value: Any, reason: str) -> None:
        """Say why a value that was not given stays open."""
        self.settle(name, open_value, open_value, f"open: {reason}")

    def correct(self, name: str, value: Any) -> None:
        """Take another spelling of what was given, or what the limits leave of it."""
        self._values[name] = value

    def note_void(self, why: str, *names: str) -> None:
        """Note those of the options that were given another value than their default: nothing
        reads them.
        """
        given = [name for name in names if self.value(name) != OPTIONS[name].default]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            self.notes.append(f"{why}: {flags} has no effect")

    def resolution(self) -> Resolution:
        groups: dict[str, dict[str, Any]] = {}
        for name, value in self._values.items():
            groups.setdefault(_GROUP_OF[name], {})[name] = value
        changed = {
            group: dataclasses.replace(getattr(self.config, group), **values)
            for group, values in groups.items()
        }
        config = dataclasses.replace(self.config, **changed)
        return Resolution(config=config, reasons=self._reasons, notes=self.notes)
