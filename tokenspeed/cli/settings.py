"""Where each setting comes from: command line, then settings file, then environment, then default.

Every value keeps its source, which `--print-config` shows (`print_config`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.cli.environment import read_environment
from tokenspeed.cli.flags import Command, Flags, Read
from tokenspeed.cli.settings_file import read_file
from tokenspeed.cli.values import from_words
from tokenspeed.config import OPTIONS, Config, make_config, unwatched
from tokenspeed.options import ConfigError
from tokenspeed.peers.answers import Takes

COMMON: dict[str, Takes] = {"--config": Takes.ONE, "--print-config": Takes.MAYBE}
"""Flags of every command that takes options. `--help` never gets here."""

SERVE = Command(options=tuple(OPTIONS.values()), own=COMMON)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """The settings of one start. `own` are the command's own flags with their words."""

    config: Config
    sources: Mapping[str, str]
    """Option -> where its value was given; an option that is not here has its default."""
    notes: Sequence[str]
    """What was granted otherwise than asked: a line each, to be shown."""
    own: Mapping[str, tuple[str, ...]]


def resolve(argv: Sequence[str], environ: Mapping[str, str], command: Command = SERVE) -> Resolved:
    """The settings that `argv` (without the command's name) and its surroundings ask for.

    Raises ConfigError, one line, for whatever cannot be taken.
    """
    flags = Flags(command)
    line, words = flags.read(list(argv))
    if command.positional is None:
        _take_model(line, words)
    else:
        line.own[command.positional] = tuple(words)
    layers = [read_environment(environ)]
    if "--config" in line.own:
        layers.append(read_file(Path(line.own["--config"][0]), command.own))
    layers.append(line)
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for layer in layers:
        values |= layer.values
        sources |= layer.sources
    notes = [note for layer in layers for note in layer.notes]
    swapped = [note for layer in layers for note in layer.swapped]
    if values.get("strict_backends") and swapped:
        raise ConfigError(f"{swapped[0]}: --strict-backends allows no other; leave one of them out")
    config = make_config(values)
    if command.is_unwatched:
        config = unwatched(config)
        sources.setdefault("prefill_first", "nobody watches an answer grow")
    return Resolved(config=config, sources=sources, notes=notes, own=line.own)


def _take_model(line: Read, words: list[str]) -> None:
    """The positional word, if any, is the model."""
    if len(words) > 1:
        raise ConfigError(f"takes one model, got also {words[1][:100]!r}")
    if words and "model" in line.values:
        raise ConfigError(f"the model is given twice: {words[0][:100]!r} and with --model")
    if words:
        line.values["model"] = from_words(OPTIONS["model"], words)
        line.sources["model"] = "command line"
