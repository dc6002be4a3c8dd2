"""Is what a cache holds of use to this machine and this installation, whatever the model?

It is told without torch, which takes seconds to import. What torch alone knows, on a CPU how many
threads it takes, is left open then, and named: a person knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from tokenspeed.compile.facts import FORMAT, Change, Facts, differences, group
from tokenspeed.compile.installation import (
    PACKAGES,
    cpu_instructions,
    installation,
    installed_sources,
)

_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))
"""Where no program could use an NVIDIA GPU without, on Linux and on Linux below Windows."""

_TOLD_BY_TORCH = ("threads", "gpu")


class Fitness:
    """Compares the facts of entries with those of here, which are found once. `machine`: all facts
    of this machine's device, from somebody who has imported torch.
    """

    def __init__(
        self, entries: Iterable[Facts], machine: Callable[[str], Facts] | None = None
    ) -> None:
        named = {name for facts in entries for name in group(facts, "sources")}
        self._here: Facts = {"format": FORMAT, **installation()}
        self._sources = installed_sources(named)
        self._machine = machine

    def misfits(self, facts: Facts) -> list[Change]:
        """Why an entry with these facts is of no use here. Empty if it fits, what is open aside."""
        sources, machine = group(facts, "sources"), group(facts, "machine")
        device = str(group(facts, "compile").get("device"))
        ours = self._machine(device) if self._machine else _known_machine(device)
        here = self._here | {"sources": self._sources_with(sources), "machine": ours}
        there = {name: facts.get(name) for name in here}
        if self._machine is None:
            there["machine"] = {name: machine[name] for name in ours if name in machine}
        return differences(here, there)

    def open(self, facts: Facts) -> Facts:
        """What is left open: facts of the machine that an entry is for."""
        machine = group(facts, "machine")
        return {name: machine[name] for name in _TOLD_BY_TORCH if name in machine}

    def _sources_with(self, named: Facts) -> Facts:
        """Of the sources here those that every entry names, and those that this one does."""
        return {
            name: digest
            for name, digest in self._sources.items()
            if name in named or name.rpartition("/")[0] in PACKAGES
        }


def _known_machine(device: str) -> Facts:
    """What is known of this machine without torch. A CPU's capability follows from what it can."""
    if device != "cuda":
        return {"instructions": cpu_instructions()}
    return {} if any(path.exists() for path in _DRIVERS) else {"gpu": None}
