"""A settings file: a YAML mapping whose keys are long flag names, with dashes or underscores.

Keys are read as flags are: options by their names and aliases, other engines' flags by the answers
of the table, so a file written for another engine works or says why not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tokenspeed.cli.flags import Command, Flags, Read, negative
from tokenspeed.cli.scan import Given
from tokenspeed.cli.values import from_yaml
from tokenspeed.config import OPTIONS
from tokenspeed.options import ConfigError, suggest
from tokenspeed.peers.answers import Takes

MAX_FILE_BYTES = 1 << 20


def read_file(path: Path, own: Mapping[str, Takes]) -> Read:
    """What a file says: any option, so that commands can share it. `own` are flags that make sense
    on the command line only.
    """
    flags = Flags(Command(options=tuple(OPTIONS.values()), own={}))
    read = Read(in_order=False)
    keys: dict[str, str] = {}
    for key, value in _load(path).items():
        name = f"--{key}".replace("_", "-")
        try:
            if keys.setdefault(name, str(key)) != str(key):
                raise ConfigError(f"{key} is {keys[name]} once more: give one of them")
            if name in own and name not in flags.options:
                raise ConfigError(f"{key} can stand on the command line only")
            take_entry(flags, read, name, str(key), value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
    read.sources.update({name: f"{path} {source}" for name, source in read.sources.items()})
    return read


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML's own loader would take the last."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if (key.tag, key.value) in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"{key.value!r:.60} stands here once more", problem_mark=key.start_mark
                )
            seen.add((key.tag, key.value))
        return node


def _load(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ConfigError(f"--config {path} is larger than {MAX_FILE_BYTES} bytes")
        entries = yaml.load(content, _Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, RecursionError, UnicodeError) as error:
        raise ConfigError(f"--config {path} is not valid YAML{_reason(error)}") from None
    if entries is None:
        return {}
    if not isinstance(entries, dict):
        raise ConfigError(f"--config {path} must hold a mapping of option names to values")
    return entries


def _reason(error: Exception) -> str:
    """Where it is broken, and why, in a line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f", line {mark.line + 1}, column {mark.column + 1}: {error.problem}"[:200]
    if isinstance(error, RecursionError):
        return ": it is nested too deeply"
    return f": {' '.join(str(error).split())[:200]}"


def take_entry(flags: Flags, read: Read, name: str, key: str, value: Any) -> None:
    """Take the flag `name`, which stands as `key` in a file or environment, into `read`."""
    if name in flags.options and flags.options[name][1]:
        option = flags.options[name][0]
        if isinstance(value, str) and not option.is_list:
            flags.take(Given(name, key, (value,)), read)
            return
        try:
            meant = from_yaml(option, value)
        except ConfigError as error:
            raise ConfigError(f"{key} {error}") from None
        read.put(option, meant, key)
    elif name not in flags.takes:
        known = [flag.removeprefix("--") for flag in flags.takes]
        raise ConfigError(f"{key} is not an option{suggest(name.removeprefix('--'), known)}")
    elif flags.takes[name] is Takes.NOTHING:
        if not isinstance(value, bool):
            raise ConfigError(f"{key} must be true or false")
        # A switch that is false and has no --no- form is one that was not given.
        if value or negative(name) in flags.takes:
            flags.take(Given(name if value else negative(name), key, ()), read)
    else:
        words = value if isinstance(value, list) else [value]
        texts = [
            json.dumps(each, default=str) if isinstance(each, dict) else str(each) for each in words
        ]
        flags.take(Given(name, key, tuple(texts)), read)
