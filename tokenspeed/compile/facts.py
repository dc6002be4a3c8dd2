"""Facts as data: what they are called, their digest, and how two sets of them differ.

`key.py` and `installation.py` find them. Nothing here needs torch: a cache can be listed, and its
entries checked and removed, without it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

FORMAT = 2
"""Of entries: goes up when what is in one, or its meaning, changes."""

Facts = dict[str, Any]
"""Groups of facts: JSON objects, numbers, strings and null."""


class Change(NamedTuple):
    """A fact that differs: both values, shortened for people; "absent" where there is none."""

    name: str
    here: str
    there: str

    def __str__(self) -> str:
        return f"{self.name} {self.here} (there {self.there})"


def digest_of(facts: Facts) -> str:
    """16 hex digits, the same for equal facts in every process."""
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def differences(here: Facts, there: Facts) -> list[Change]:
    """The facts in which two sets differ."""
    ours, theirs = dict(flat(here)), dict(flat(there))
    found = []
    for name in sorted(ours | theirs):
        mine, other = (repr(facts[name]) if name in facts else "absent" for facts in (ours, theirs))
        if mine != other:
            found.append(Change(name, f"{mine:.60}", f"{other:.60}"))
    return found


def group(facts: Facts, name: str) -> Facts:
    """A group of facts; empty where a manifest of unknown origin has none."""
    found = facts.get(name)
    return found if isinstance(found, dict) else {}


def flat(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every fact by its whole name."""
    for name, value in facts.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
