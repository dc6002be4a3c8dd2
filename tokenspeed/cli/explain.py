"""`tokenspeed explain MODEL`: read the settings, and hand them over."""

from __future__ import annotations

import importlib
import os

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import COMMON, resolve
from tokenspeed.config import OPTIONS
from tokenspeed.log import logger, setup_logging
from tokenspeed.options import ConfigError, options_of
from tokenspeed.peers.answers import Takes
from tokenspeed.server_config import ServerConfig

_EXPLAINER, _VERIFIER = "tokenspeed.engine.explain", "tokenspeed.engine.verify"
"""Imported when they are needed: help does not wait for them."""

_HEAD = """
usage: tokenspeed explain [MODEL] [options]

What the compiler made of MODEL: which pass matched what and what it saved, the kernels and the
lines of the model that each came from, the pieces, and for a pass that did not match how near it
came. It is compiled first if it is not in the cache. Give the options that you serve with.

Examples
  tokenspeed explain ./folder                      tables
  tokenspeed explain ./folder --html folder.html   the graphs before and after, for a browser
  tokenspeed explain ./folder --json               everything, for programs
  tokenspeed explain ./folder --verify             run every pass and compare with the plain model

The exit status is 1 where a pass is found to compute something else, or where compiling fails.
"""

_OWN = {
    "--json": (Takes.NOTHING, "print JSON, for programs"),
    "--html FILE": (Takes.ONE, "write one page for a browser, which needs no network"),
    "--verify": (
        Takes.NOTHING,
        "load the weights, replay a step through each piece with and without each pass, and name "
        "the pass and piece at fault",
    ),
    "--quarantine": (
        Takes.NOTHING,
        "with --verify: print the --disable-pass that leaves out what is at fault, or write it "
        "into the file that --config names",
    ),
}

COMMAND = Command(
    options=tuple(OPTIONS.values()),
    own={**COMMON, **{name.split()[0]: takes for name, (takes, _) in _OWN.items()}},
)

_OF_SERVER = {option.name for option in options_of(ServerConfig)} - {"log_level"}
_LISTED = tuple(option for option in OPTIONS.values() if option.name not in _OF_SERVER)
"""In help. The others are taken as well, so that what one serves with can be pasted."""


def main(argv: list[str]) -> int:
    """The exit status; ConfigError for what cannot be asked for."""
    topic = pages.wanted(argv)
    if topic is not None:
        texts = {name: text for name, (_, text) in _OWN.items()}
        print(pages.page(_HEAD, _LISTED, texts, topic))
        return 0
    resolved = resolve(argv, os.environ, COMMAND)
    if "--print-config" in resolved.own:
        print_settled(resolved)
        return 0
    own, config, as_json = resolved.own, resolved.config, "--json" in resolved.own
    html = own.get("--html", (None,))[0]
    if html is not None and "--verify" in own:
        raise ConfigError("--html shows the receipt, and --verify has none: ask for one of them")
    if "--quarantine" in own and "--verify" not in own:
        raise ConfigError("--quarantine needs --verify, which finds what is at fault")
    setup_logging(config.server.log_level)
    for note in resolved.notes:
        logger.info("%s", note)
    if "--verify" in own:
        file = own.get("--config", (None,))[0] if "--quarantine" in own else None
        verifier = importlib.import_module(_VERIFIER)
        status: int = verifier.verify(
            config, as_json=as_json, quarantine="--quarantine" in own, settings_file=file
        )
        return status
    status = importlib.import_module(_EXPLAINER).explain(config, as_json=as_json, html=html)
    return status
