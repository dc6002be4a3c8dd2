"""`tokenspeed cache ls|why|prune|verify|export|import`: read the settings, then hand over."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_given, print_settled
from tokenspeed.cli.settings import COMMON, Resolved, resolve
from tokenspeed.cli.values import from_words
from tokenspeed.config import OPTIONS
from tokenspeed.log import logger, setup_logging
from tokenspeed.options import ConfigError, Option, options_of, suggest
from tokenspeed.peers.answers import Takes
from tokenspeed.server_config import ServerConfig

_RUNNER, _UPKEEP = "tokenspeed.engine.cache_commands", "tokenspeed.engine.cache_upkeep"
"""Imported when they are needed: help does not wait for them. The latter imports no torch."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

_Own = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, kw_only=True)
class _Action:
    """One of the commands. `own` are its own flags: what each takes, and its text for help."""

    usage: str
    own: Mapping[str, tuple[Takes, str]]
    arguments: Callable[[_Own], dict[str, Any]]
    """What its function wants to know, out of its own flags. Raises ConfigError."""
    takes_model: bool = False
    runner: str = _RUNNER

    @property
    def command(self) -> Command:
        own = {name.split()[0]: takes for name, (takes, _) in self.own.items()} | COMMON
        options = tuple(OPTIONS.values()) if self.takes_model else _FEW
        return Command(options=options, own=own, positional=None if self.takes_model else _WORDS)

    @property
    def listed(self) -> tuple[Option, ...]:
        """Options in help: those of the server are taken as well, so that what one serves with can
        be pasted.
        """
        return tuple(each for each in self.command.options if each.name not in _OF_SERVER)


_OF_SERVER = {option.name for option in options_of(ServerConfig)} - {"log_level"}
_FEW = (OPTIONS["cache_dir"], OPTIONS["log_level"])
_MAX_SIZE = Option(
    name="max_size",
    kind=int,
    is_list=False,
    is_optional=False,
    default=None,
    help="",
    aliases=(),
    choices=(),
    low=0,
    high=1 << 50,
    secret=False,
    suffixes=True,
)
_WORDS = "words"
"""Where positional words stand among the own flags of an action that takes no model."""

_JSON = {"--json": (Takes.NOTHING, "print JSON, for programs")}


def _json(own: _Own) -> dict[str, Any]:
    return {"as_json": "--json" in own, **_no_words(own)}


def _no_words(own: _Own) -> dict[str, Any]:
    if words := own.get(_WORDS):
        raise ConfigError(f"takes no words, got {words[0][:100]!r}")
    return {}


def _limits(own: _Own) -> dict[str, Any]:
    _no_words(own)
    if not own.keys() & {"--older-than", "--max-size", "--all"}:
        raise ConfigError("needs --older-than AGE, --max-size SIZE or --all")
    age, size = own.get("--older-than"), own.get("--max-size")
    max_bytes = _size(size[0]) if size else None
    return {
        "max_age_s": _age(age[0]) if age else None,
        "max_bytes": 0 if "--all" in own else max_bytes,
        "is_dry": "--dry-run" in own,
    }


def _age(text: str) -> int:
    found = _AGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--older-than must be a number and s, m, h, d or w, got {text[:100]!r}")
    return int(found[1]) * _SECONDS[found[2]]


def _size(text: str) -> int:
    try:
        size: int = from_words(_MAX_SIZE, [text])
    except ConfigError as error:
        raise ConfigError(f"--max-size {error}") from None
    return size


def _output(own: _Own) -> dict[str, Any]:
    if not own.get("--output", ("",))[0]:
        raise ConfigError("needs --output FILE")
    return {"output": own["--output"][0]}


def _archive(own: _Own) -> dict[str, Any]:
    words, digest = own[_WORDS], own.get("--sha256", (None,))[0]
    if len(words) != 1:
        raise ConfigError(f"takes one FILE, got {len(words)}")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ConfigError(f"--sha256 must be 64 hexadecimal digits, got {digest[:100]!r}")
    if not os.path.isfile(words[0]):
        why = "is a folder" if os.path.isdir(words[0]) else "no such file"
        raise ConfigError(f"{words[0]}: {why}; name an archive that warmup or cache export wrote")
    if digest is None and "--trust" not in own:
        raise ConfigError(
            "an archive is code, which starts will run as you: give --sha256 DIGEST (export prints "
            "it), or --trust if you know where the file comes from"
        )
    return {"path": words[0], "sha256": digest}


ACTIONS = {
    "ls": _Action(
        usage="ls                     every entry: size, age, what it is for, whether it fits here",
        own=_JSON,
        arguments=_json,
    ),
    "why": _Action(
        usage="why [MODEL] [options]  would a start find its program? If not: which facts differ",
        own=_JSON,
        arguments=_json,
        takes_model=True,
    ),
    "prune": _Action(
        usage="prune                  remove entries, but none that is being made",
        own={
            "--older-than AGE": (Takes.ONE, "those used longer ago: 12h, 30d, 8w"),
            "--max-size SIZE": (
                Takes.ONE,
                "those longest unused, until the rest has at most this: 500M, 2G",
            ),
            "--all": (Takes.NOTHING, "all of them"),
            "--dry-run": (Takes.NOTHING, "only say what would be removed"),
        },
        arguments=_limits,
        runner=_UPKEEP,
    ),
    "verify": _Action(
        usage="verify                 check every digest of every entry",
        own=_JSON,
        arguments=_json,
        runner=_UPKEEP,
    ),
    "export": _Action(
        usage="export MODEL|ENTRY     write an archive, and print its SHA-256",
        own={"--output FILE": (Takes.ONE, "the archive")},
        arguments=_output,
        takes_model=True,
    ),
    "import": _Action(
        usage="import FILE            put what an archive holds into the cache",
        own={
            "--sha256 DIGEST": (Takes.ONE, "what export printed; anything else is refused"),
            "--trust": (Takes.NOTHING, "take it without: it is code, and will run as you"),
        },
        arguments=_archive,
    ),
}

_HEAD = """
usage: tokenspeed cache ACTION [options]

What has been compiled, and is taken by later starts.

Actions
  {usages}

why and export take the options of serve. The exit status is 0 for a hit, for what is whole and for
what was done; 1 for a miss, for what is damaged and for what failed.

Examples
  tokenspeed cache why ./folder --dtype bfloat16
  tokenspeed cache export ./folder --output folder.tar
  tokenspeed cache import folder.tar --sha256 DIGEST
  tokenspeed cache prune --older-than 30d --dry-run
"""


def main(argv: list[str]) -> int:
    """The exit status; ConfigError for what cannot be asked for."""
    topic = pages.wanted(argv)
    name = argv[0] if argv else ""
    if topic is not None:
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
    chosen = {name: ACTIONS[name]} if name in ACTIONS else ACTIONS
    flags: dict[str, list[str]] = {}
    texts: dict[str, str] = {}
    for each, action in chosen.items():
        for flag, (_, text) in action.own.items():
            flags.setdefault(flag, []).append(each)
            texts[flag] = f"{', '.join(flags[flag])}: {text}" if len(chosen) > 1 else text
    usages = "\n  ".join(action.usage for action in chosen.values())
    options = _FEW if len(chosen) > 1 else next(iter(chosen.values())).listed
    return pages.page(_HEAD.format(usages=usages), options, texts, topic)
