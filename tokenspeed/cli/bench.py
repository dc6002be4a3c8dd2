"""`tokenspeed bench WHAT ...`: find the command by name, as `tokenspeed` finds its own."""

from __future__ import annotations

import importlib

from tokenspeed.cli import pages
from tokenspeed.options import ConfigError, suggest

COMMANDS = {
    "serve": ("tokenspeed.cli.bench_serve", "load any OpenAI-compatible server, and time it"),
    "latency": ("tokenspeed.cli.bench_offline", "time a step, time to the first token; no server"),
    "throughput": ("tokenspeed.cli.bench_offline", "tokens a second of many requests; no server"),
    "startup": ("tokenspeed.cli.bench_startup", "where the time from start to first token goes"),
}

_HELP = """usage: tokenspeed bench WHAT [options]

Measure, by the names and definitions of other engines' benchmarks.

{rows}

`tokenspeed bench --flag ...` is `bench serve --flag ...`. tokenspeed bench WHAT --help has more."""


def main(argv: list[str]) -> int:
    """The exit status of the measurement; ConfigError for what cannot be taken."""
    if argv[:1] and argv[0] in COMMANDS:
        what, words = argv[0], argv[1:]
    elif pages.wanted(argv[:1]) == "":
        rows = [f"  {name:11} {text}" for name, (_, text) in COMMANDS.items()]
        print(_HELP.format(rows="\n".join(rows)))
        return 0
    elif argv[:1] and argv[0].startswith("-"):
        what, words = "serve", argv
    else:
        known = ", ".join(COMMANDS)
        given = f"; {argv[0][:100]} is none{suggest(argv[0], COMMANDS)}" if argv else ""
        raise ConfigError(f"what is to be measured comes first, one of {known}{given}")
    status: int = importlib.import_module(COMMANDS[what][0]).main(what, words)
    return status
