"""Settings from the environment: TOKENSPEED_ and a flag's name, in capitals with underscores.

Variables are read as flags are (`settings_file`): options by their names and aliases, other
engines' flags by the answers of the table. A name that is none of these is an error, as a flag is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tokenspeed.cli.flags import Command, Flags, Read
from tokenspeed.cli.scan import Given
from tokenspeed.cli.settings_file import take_entry
from tokenspeed.config import OPTIONS
from tokenspeed.options import ConfigError, suggest
from tokenspeed.peers.answers import Takes

ENVIRONMENT = "TOKENSPEED_"
NOT_OPTIONS = frozenset({"TOKENSPEED_STARTUP_TIMING", "TOKENSPEED_TEST_EXAMPLES"})
"""Variables of ours that are read elsewhere, and set nothing."""

# Kubernetes gives each pod such variables of each service near it: of one that is called
# "tokenspeed" or "tokenspeed-..." they begin as ours do.
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))\w*")
_LINK_SCHEMES = ("tcp://", "udp://", "sctp://")
_SWITCH = {"1": True, "true": True, "0": False, "false": False}


def read_environment(environ: Mapping[str, str]) -> Read:
    """What the environment says. Raises ConfigError naming the variable that cannot be taken."""
    flags = Flags(Command(options=tuple(OPTIONS.values()), own={}))
    read = Read(in_order=False)
    for variable in sorted(environ):
        if variable.startswith(ENVIRONMENT) and variable not in NOT_OPTIONS:
            _take(flags, read, variable, environ[variable])
    sources = {name: f"environment {variable}" for name, variable in read.sources.items()}
    read.sources.update(sources)
    return read


def _take(flags: Flags, read: Read, variable: str, text: str) -> None:
    name = "--" + variable.removeprefix(ENVIRONMENT).lower().replace("_", "-")
    option, is_on = flags.options.get(name, (None, False))
    is_link = text.startswith(_LINK_SCHEMES)
    if name not in flags.takes:
        if is_link or _SERVICE_LINK.fullmatch(variable):
            return
        known = [ENVIRONMENT + each.upper() for each in OPTIONS]
        raise ConfigError(f"{variable} is not an option{suggest(variable, known)}")
    if not text.strip():
        # An empty key would mean a server without one: never what was meant.
        if option is not None and option.secret:
            raise ConfigError(f"{variable} is empty; give it a value or unset it")
        return
    if option is None or not is_on:
        is_switch = flags.takes[name] is Takes.NOTHING
        said = _SWITCH.get(text.strip().lower(), text) if is_switch else text.strip()
        take_entry(flags, read, name, variable, said)
        return
    words = text.split() if option.is_list else [text.strip()]
    try:
        flags.take(Given(name, variable, tuple(words)), read)
    except ConfigError as error:
        hint = " (a Kubernetes service link: set enableServiceLinks: false in the pod)"
        raise ConfigError(f"{error}{hint if is_link else ''}") from None
