"""`tokenspeed cache ls|why|prune|verify|export|import`: read the settings, then hand over."""

from __future__ import annotations

import importlib
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.cli import pages
from tokenspeed.cli.cache_arguments import WORDS, Own, archive, as_json, limits, output
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_given, print_settled
from tokenspeed.cli.settings import COMMON, Resolved, resolve
from tokenspeed.config import OPTIONS
from tokenspeed.log import logger, setup_logging
from tokenspeed.options import ConfigError, Option, options_of, suggest
from tokenspeed.peers.answers import Takes
from tokenspeed.server_config import ServerConfig

_RUNNER, _UPKEEP = "tokenspeed.engine.cache_commands", "tokenspeed.engine.cache_upkeep"
"""Imported when they are needed: help does not wait for them. The latter imports no torch."""


@dataclass(frozen=True, kw_only=True)
class _Action:
    """One of the commands. `words` are what it is about; `own` its own flags: what each takes, and
    its text for help. `more` is what only its own page says, with the words of its examples.
    """

    what: str
    more: str
    examples: tuple[str, ...]
    own: Mapping[str, tuple[Takes, str]]
    arguments: Callable[[Own], dict[str, Any]]
    """What its function wants to know, out of its own flags. Raises ConfigError."""
    words: str = ""
    takes_model: bool = False
    runner: str = _RUNNER

    @property
    def command(self) -> Command:
        own = {name.split()[0]: takes for name, (takes, _) in self.own.items()} | COMMON
        options = tuple(OPTIONS.values()) if self.takes_model else _FEW
        return Command(options=options, own=own, positional=None if self.takes_model else WORDS)

    @property
    def listed(self) -> tuple[Option, ...]:
        """Options in help: those of the server are taken as well, so that what one serves with can
        be pasted.
        """
        if not self.takes_model:
            return _FEW
        return tuple(each for each in self.command.options if each.name not in _OF_SERVER)


_OF_SERVER = {option.name for option in options_of(ServerConfig)} - {"log_level"}
_FEW = (OPTIONS["cache_dir"], OPTIONS["log_level"])
_JSON = {"--json": (Takes.NOTHING, "print JSON, for programs")}


ACTIONS = {
    "ls": _Action(
        what="every entry: size, age, what it is for, whether it fits here",
        more="Sets of compiled GPU kernels come after the entries. What only torch could tell, and "
        "torch takes seconds to import, is named where it decides: yes, with 2 threads.",
        examples=("", "--json"),
        own=_JSON,
        arguments=as_json,
        runner=_UPKEEP,
    ),
    "why": _Action(
        words="[MODEL]",
        what="would a start find its program? If not: which facts differ",
        more="It takes the options of serve, and answers for a start with them. The exit status is "
        "0 for a hit, 1 for a miss.",
        examples=("./folder --dtype bfloat16", "./folder --json"),
        own=_JSON,
        arguments=as_json,
        takes_model=True,
    ),
    "prune": _Action(
        what="remove entries, but none that is being made",
        more="At least one of --older-than, --max-size and --all says what goes. Sets of GPU "
        "kernels go by the same rules.",
        examples=("--older-than 30d --dry-run", "--max-size 2G"),
        own={
            "--older-than AGE": (Takes.ONE, "those used longer ago: 12h, 30d, 8w"),
            "--max-size SIZE": (
                Takes.ONE,
                "those longest unused, until the rest has at most this: 500M, 2G",
            ),
            "--all": (Takes.NOTHING, "all of them"),
            "--dry-run": (Takes.NOTHING, "only say what would be removed"),
        },
        arguments=limits,
        runner=_UPKEEP,
    ),
    "verify": _Action(
        what="check every digest of every entry",
        more="And of every GPU kernel. The exit status is 1 if something is damaged; a start "
        "makes that anew.",
        examples=("", "--json"),
        own=_JSON,
        arguments=as_json,
        runner=_UPKEEP,
    ),
    "export": _Action(
        words="MODEL|ENTRY",
        what="write an archive, and print its SHA-256",
        more="The entry is that of a start of MODEL with these options, which are those of "
        "serve, or the one called ENTRY.",
        examples=("./folder --output folder.tar",),
        own={"--output FILE": (Takes.ONE, "the archive")},
        arguments=output,
        takes_model=True,
    ),
    "import": _Action(
        words="FILE",
        what="put what an archive holds into the cache",
        more="What of it does not fit this machine is said, and imported all the same.",
        examples=("folder.tar --sha256 DIGEST",),
        own={
            "--sha256 DIGEST": (Takes.ONE, "what export printed; anything else is refused"),
            "--trust": (Takes.NOTHING, "take it without: it is code, and will run as you"),
        },
        arguments=archive,
    ),
}

_HEAD = """
usage: tokenspeed cache ACTION [options]

What has been compiled, and is taken by later starts.

Actions
  {actions}

The exit status is 0 for a hit, for what is whole and for what was done; 1 for a miss, for what is
damaged and for what failed. tokenspeed cache ACTION --help has more.

Examples
  tokenspeed cache why ./folder --dtype bfloat16
  tokenspeed cache export ./folder --output folder.tar
  tokenspeed cache import folder.tar --sha256 DIGEST
  tokenspeed cache prune --older-than 30d --dry-run
"""

_ACTION_HEAD = """
usage: {usage} [options]

{what}.
{more}

Examples
  {examples}
"""


def main(argv: list[str]) -> int:
    """The exit status; ConfigError for what cannot be asked for."""
    topic = pages.wanted(argv)
    name = argv[0] if argv else ""
    if topic is not None and (name in ACTIONS or name.startswith("-")):
        print(_help(name, topic))
        return 0
    if name not in ACTIONS:
        given = f"; {name[:100]} is none{suggest(name, ACTIONS)}" if argv else ""
        raise ConfigError(f"what is to be done comes first, one of {', '.join(ACTIONS)}{given}")
    try:
        return _run(name, ACTIONS[name], argv[1:])
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _run(name: str, action: _Action, argv: list[str]) -> int:
    resolved: Resolved = resolve(argv, os.environ, action.command)
    if "--print-config" in resolved.own:
        (print_settled if action.takes_model else print_given)(resolved)
        return 0
    arguments = action.arguments(resolved.own)
    setup_logging(resolved.config.server.log_level)
    for note in resolved.notes:
        logger.info("%s", note)
    status: int = importlib.import_module(action.runner).run(name, resolved.config, **arguments)
    return status


def _help(name: str, topic: str) -> str:
    if name in ACTIONS:
        return _help_of(name, ACTIONS[name], topic)
    flags: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for each, action in ACTIONS.items():
        for flag, (_, text) in action.own.items():
            flags.setdefault(flag, []).append(each)
            texts[flag] = f"{', '.join(flags[flag])}: {text}"
    width = max(len(f"{each} {action.words}") for each, action in ACTIONS.items())
    rows = [
        f"{f'{each} {action.words}':{width}}  {action.what}" for each, action in ACTIONS.items()
    ]
    return _page(_HEAD.format(actions="\n  ".join(rows)), _FEW, texts, topic)


def _help_of(name: str, action: _Action, topic: str) -> str:
    command = f"tokenspeed cache {name}"
    head = _ACTION_HEAD.format(
        usage=f"{command} {action.words}".rstrip(),
        what=action.what[0].upper() + action.what[1:],
        more=textwrap.fill(action.more, 98),
        examples="\n  ".join(f"{command} {words}".rstrip() for words in action.examples),
    )
    return _page(head, action.listed, {flag: text for flag, (_, text) in action.own.items()}, topic)


def _page(head: str, options: tuple[Option, ...], texts: dict[str, str], topic: str) -> str:
    """The few options that are no model's stand with the command's own flags."""
    if topic or options is not _FEW:
        return pages.page(head, options, texts, topic)
    return pages.page(head, (), texts | pages.rows(options), topic)
