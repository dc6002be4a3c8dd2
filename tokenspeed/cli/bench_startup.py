"""`tokenspeed bench startup MODEL`: read the settings, then hand over to the measurement."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import COMMON, Resolved, resolve
from tokenspeed.config import GROUPS, OPTIONS, Config
from tokenspeed.options import ConfigError, options_of
from tokenspeed.peers.answers import Takes
from tokenspeed.server_config import ServerConfig

_RUNNER = "tokenspeed.bench.command"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

MAX_RUNS = 100
_DEFAULT_RUNS = 3

_HEAD = """
usage: tokenspeed bench startup [MODEL] [options]

Start the server in fresh processes, ask each for one completion, and say where the time from
process start to first token went: phases, what the start waited for, and what nothing accounts for.
Cold starts have an empty compile cache, warm ones what a cold one left; -O0 starts use none. The
model is compiled unless a level is given. The other options are those of serve.

Examples
  tokenspeed bench startup                      the bundled model, 3 cold and 3 warm starts
  tokenspeed bench startup ./folder --runs 5 --trace trace.json
  tokenspeed bench startup ./folder -O0 --json  eager starts, for comparison
"""

_OWN = {
    "--runs N": f"starts of each kind [{_DEFAULT_RUNS}]",
    "--trace FILE": "write a Chrome trace of all starts (chrome://tracing, ui.perfetto.dev)",
    "--json": "print the figures as JSON",
}

_OURS = ("host", "port", "cache_dir", "log_level")
"""Options that the measurement sets itself."""
_NOT_OURS = {option.name for option in options_of(ServerConfig) if option.name.startswith("ssl_")}
"""It asks over plain HTTP."""

COMMAND = Command(
    options=tuple(
        option for option in OPTIONS.values() if option.name not in _NOT_OURS.union(_OURS)
    ),
    own={**COMMON, "--runs": Takes.ONE, "--trace": Takes.ONE, "--json": Takes.NOTHING},
)


def main(name: str, argv: list[str]) -> int:
    """The exit status of the measurement; ConfigError for what cannot be taken."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page(_HEAD, COMMAND.options, _OWN, topic))
        return 0
    resolved = resolve(argv, os.environ, COMMAND)
    if "--print-config" in resolved.own:
        print_settled(resolved)
        return 0
    for note in resolved.notes:
        print(note, file=sys.stderr)
    trace = resolved.own.get("--trace")
    status: int = importlib.import_module(_RUNNER).startup(
        given_settings(resolved, _OURS),
        num_runs=_num_runs(resolved),
        trace=Path(trace[0]) if trace else None,
        as_json="--json" in resolved.own,
    )
    return status


def given_settings(resolved: Resolved, without: Collection[str]) -> dict[str, Any]:
    """What was given, by option name."""
    flat = _flat(resolved.config)
    return {name: flat[name] for name in resolved.sources if name not in without}


def _flat(config: Config) -> dict[str, Any]:
    return {
        name: value
        for group in GROUPS
        for name, value in dataclasses.asdict(getattr(config, group)).items()
    }


def _num_runs(resolved: Resolved) -> int:
    if "--runs" not in resolved.own:
        return _DEFAULT_RUNS
    text = resolved.own["--runs"][0]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_RUNS:
        raise ConfigError(f"--runs must be from 1 to {MAX_RUNS}, got {text[:100]!r}")
    return int(text)
