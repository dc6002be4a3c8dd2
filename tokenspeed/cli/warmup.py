"""`tokenspeed warmup MODEL`: read the settings, for each dtype and level, and hand them over."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import COMMON, Resolved, resolve
from tokenspeed.cli.values import from_words
from tokenspeed.config import OPTIONS, Config
from tokenspeed.log import logger, setup_logging
from tokenspeed.options import ConfigError, options_of
from tokenspeed.peers.answers import Takes
from tokenspeed.peers.table import TABLE
from tokenspeed.server_config import ServerConfig

_RUNNER = "tokenspeed.engine.warmup"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

_HEAD = """
usage: tokenspeed warmup [MODEL] [options]

Compile MODEL into the cache that `tokenspeed serve` takes programs from. No weights are needed or
read: config.json, or the metadata of a GGUF file, is enough. Give the options that you will serve
with; what is in the cache already is not compiled again. On CUDA a start is then rehearsed with
made-up weights, for the kernels that it launches: that takes the GPU memory of a start.

Examples
  tokenspeed warmup ./folder                              for this machine, as serve would run it
  tokenspeed warmup ./folder --dtype bfloat16 float32     for two dtypes
  tokenspeed warmup ./folder --autotune                   and measure, so that no start has to
  tokenspeed warmup ./folder --export folder.tar          and everything in one file, for others
"""

_OWN = {
    "--dtype DTYPE ...": "compile for each of these (may be repeated)",
    "--levels N ...": "compile for each of these optimisation levels [1]",
    "--autotune": "measure which linear kernel is fastest for each layer, and keep the table: on "
    "CUDA that of -O3, on a CPU that of a first start",
    "--export FILE": "write what a start with these settings needs into one archive; its SHA-256 "
    "is printed",
}

_NOT_OURS = {option.name for option in options_of(ServerConfig)} - {"log_level"}
_NOT_OURS |= {"dtype"}

COMMAND = Command(
    options=tuple(option for option in OPTIONS.values() if option.name not in _NOT_OURS),
    own={
        **COMMON,
        **{"--dtype": Takes.MANY, "--levels": Takes.MANY},
        **{"--autotune": Takes.NOTHING, "--export": Takes.ONE},
    },
    headings=tuple(heading for heading in TABLE if heading != "Server"),
)


def main(argv: list[str]) -> int:
    """The exit status; ConfigError for settings that cannot be taken."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page(_HEAD, COMMAND.options, _OWN, topic))
        return 0
    resolved = resolve(argv, os.environ, COMMAND)
    if "--print-config" in resolved.own:
        print_settled(resolved)
        return 0
    configs = list(_configs(resolved))
    export = resolved.own.get("--export", (None,))[0]
    setup_logging(resolved.config.server.log_level)
    for note in resolved.notes:
        logger.info("%s", note)
    autotune = "--autotune" in resolved.own
    status: int = importlib.import_module(_RUNNER).warmup(configs, export, autotune=autotune)
    return status


def _configs(resolved: Resolved) -> Iterator[Config]:
    """The settings of each start that is prepared for."""
    config = resolved.config
    level = 1 if config.compile.level is None else config.compile.level
    levels = _entries("--levels", "level", resolved.own.get("--levels", (str(level),)))
    dtypes = _entries("--dtype", "dtype", resolved.own.get("--dtype", (config.model.dtype,)))
    if config.compile.dump_passes is not None and len(set(dtypes)) > 1:
        raise ConfigError("--dump-passes writes the graphs of one program: give one --dtype")
    for dtype in dtypes:
        for level in levels:
            yield dataclasses.replace(
                config,
                model=dataclasses.replace(config.model, dtype=dtype),
                compile=dataclasses.replace(config.compile, level=level),
            )


def _entries(flag: str, option: str, words: Sequence[str]) -> list[Any]:
    try:
        return [from_words(OPTIONS[option], [word]) for word in words]
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None
