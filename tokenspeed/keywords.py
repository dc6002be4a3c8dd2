"""Keywords of `LLM` as settings: options by their names, and what other engines call them.

The latter get the answers that their flags get on the command line, from the same table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tokenspeed.config import GROUPS, OPTIONS, Config, make_config
from tokenspeed.log import logger
from tokenspeed.options import ConfigError, contradiction, options_of, suggest
from tokenspeed.peers.answers import Answer, Granted, Known, Refused, Same, Takes
from tokenspeed.peers.table import PEER_VALUES, TABLE

_SERVER = {option.name for option in options_of(GROUPS["server"])}
_OPTIONS = {name: option for name, option in OPTIONS.items() if name not in _SERVER}
_BY_FLAG = {flag: option for option in _OPTIONS.values() for flag in (option.flag, *option.aliases)}
_ROWS = {name: (heading, row) for heading in TABLE for row in TABLE[heading] for name in row.names}


def config_of(model: str | None, given: Mapping[str, Any]) -> Config:
    """The settings of a model and keywords. None is a keyword that was not given. TypeError for a
    name that means nothing here, ConfigError for a value that cannot be taken, or for two keywords
    that contradict each other. What is granted otherwise is logged.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, value in (("model", model), *given.items()):
        shown = f"{name}={value!r:.100}"
        for option, meant in _meant(name, value):
            if option in values and values[option] != meant:
                raise contradiction(sources[option], shown, option)
            values[option], sources[option] = meant, shown
    return make_config(values)


def _meant(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Names and values of our options."""
    flag = "--" + name.replace("_", "-")
    heading, row = _ROWS.get(flag, ("", None))
    is_server = name in _SERVER or heading == "Server"
    option = _OPTIONS.get(name) or _BY_FLAG.get(flag)
    if value is None and (is_server or option or row):
        return
    value = _plain(value)
    if is_server:
        raise TypeError(f"LLM() takes no option {name!r}: it is the server's")
    if option:
        ours, meaning = PEER_VALUES.get((option.name, str(value)), (value, ""))
        if meaning:
            logger.info("%s=%r: %s is used; %s", name, value, ours, meaning)
        yield option.name, ours
    elif row is None:
        raise TypeError(f"LLM() takes no option {name!r}{suggest(name, _OPTIONS)}")
    else:
        yield from _answered(row, name, value)


def _answered(row: Known, name: str, value: Any) -> Iterator[tuple[str, Any]]:
    is_switch = row.takes is Takes.NOTHING
    if is_switch and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r:.100}")
    _, off = _ROWS.get("--no-" + name.replace("_", "-"), ("", None))
    if not is_switch or value:
        answer: Answer | None = row.answer_to(_words(value))
    else:
        answer = row.off if off is None else off.answer
    match answer:
        case Refused(why=why):
            raise ConfigError(f"{name}={value!r:.100} is not supported: {why}")
        case Granted(why=why):
            logger.info("%s=%.100r: %s", name, value, why)
        case Same(words=(word, *_), why=why):
            if why:
                logger.info("%s=%.100r: %s", name, value, why)
            yield _switched(word) if is_switch else (_BY_FLAG[word].name, value)


def _plain(value: Any) -> Any:
    """A dtype by its name, a list as options hold it."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return tuple(value) if isinstance(value, list) else value


def _switched(word: str) -> tuple[str, Any]:
    """`-O0`, `--flag` or `--no-flag` as an option and its value."""
    if word.startswith("-O"):
        return _BY_FLAG["-O"].name, int(word.removeprefix("-O"))
    positive = word.replace("--no-", "--", 1)
    return _BY_FLAG[positive].name, positive == word


def _words(value: Any) -> tuple[str, ...]:
    """As they would stand on a command line."""
    several = value if isinstance(value, list | tuple) else [value]
    return tuple(
        json.dumps(each, default=str) if isinstance(each, dict) else str(each) for each in several
    )
