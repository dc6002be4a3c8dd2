"""What facts that differ are set by: what a person gave, or another fact from which they follow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tokenspeed.compile.facts import Change


class Explained(NamedTuple):
    """A change, and what sets the fact; or, if it `follows`, from which other it does."""

    change: Change
    set_by: str
    follows: bool = False

    def __str__(self) -> str:
        return f"{self.change}, {'' if self.follows else 'set by '}{self.set_by}"


@dataclass(frozen=True)
class _Cause:
    """Of facts whose names begin with `start`, and of which one value is `value`, if it names any.

    `ways`: options and variables that set them. `follows`: the facts they follow from where none of
    these is given, or how their names begin, the nearest first. `otherwise`: what else it was; "":
    one of the ways, there.
    """

    start: str
    ways: tuple[str, ...] = ()
    follows: tuple[str, ...] = ()
    otherwise: str = ""
    value: str = ""

    def is_of(self, change: Change) -> bool:
        is_value = not self.value or self.value in (change.here, change.there)
        return change.name.startswith(self.start) and is_value


_OURS = "the version of TokenSpeed"
_PIPELINE = "sources.passes/__init__.py"
"""Which passes there are, and where they are on."""
_CAUSES = (
    _Cause("format", otherwise=_OURS),
    _Cause("compile.model", otherwise="the model"),
    _Cause("compile.device", ("--device",), otherwise="the machine, or --device there"),
    _Cause(
        *("compile.dtype", ("--dtype",), ("compile.device",)),
        otherwise="the checkpoint, or --dtype there",
    ),
    _Cause(
        *("compile.fuses_prologue", ("--attention-backend",), ("compile.device", "compile.dtype")),
        otherwise="the attention backend",
    ),
    _Cause("compile.strict_passes", ("--strict-passes",)),
    _Cause("compile.passes.", ("--disable-pass",), value="'disabled'"),
    _Cause(
        *("compile.passes.", ("--compile-ranges",), ("compile.device", _PIPELINE)), value="absent"
    ),
    _Cause(
        *("compile.passes.", (), ("compile.device", "compile.fuses_prologue", _PIPELINE)),
        otherwise=_OURS,
    ),
    _Cause(
        *("layout.", ("--weight-layout",), ("compile.device", "compile.dtype")),
        otherwise="the model's files, or --weight-layout there",
    ),
    _Cause("model.", otherwise="the model"),
    _Cause("sources.models/", (), ("compile.model", "layout."), otherwise=_OURS, value="absent"),
    _Cause("sources.", otherwise=_OURS),
    _Cause("versions.platform", otherwise="the machine"),
    _Cause("versions.", otherwise="the packages installed"),
    _Cause(
        *("machine.threads", ("OMP_NUM_THREADS",), ("compile.device",)),
        otherwise="the cores, or OMP_NUM_THREADS there",
    ),
    _Cause("machine.", (), ("compile.device",), otherwise="the machine"),
    _Cause("settings.", otherwise="the environment"),
)
"""The first that is of a fact counts; every fact has one."""

_OF_ANOTHER_VERSION = _Cause("", otherwise=_OURS)


def explained(changes: Iterable[Change], given: Collection[str] | None = None) -> list[Explained]:
    """Each change with its cause, those that follow from others last. `given`: the options and
    variables that somebody set here; None: not known, so those that could be are named.
    """
    listed = list(changes)
    names = {change.name for change in listed}
    found = [_explained(change, names, given) for change in listed]
    return sorted(found, key=lambda each: each.follows)


def _explained(
    change: Change, changed: Collection[str], given: Collection[str] | None
) -> Explained:
    cause = next((each for each in _CAUSES if each.is_of(change)), _OF_ANOTHER_VERSION)
    if ways := [way for way in cause.ways if given is not None and way in given]:
        return Explained(change, ways[0])
    for parent in cause.follows:
        if any(name.startswith(parent) for name in changed):
            return Explained(change, f"follows from {parent.rstrip('.')}", follows=True)
    if given is None and cause.ways:
        return Explained(change, cause.ways[0])
    return Explained(change, cause.otherwise or f"{cause.ways[0]} there")
