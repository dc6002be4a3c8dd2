"""`tokenspeed bench serve`: read the options, then hand over to the load generator."""

from __future__ import annotations

import importlib
from typing import Any

from tokenspeed.bench.serve_options import SERVE_GROUPS, ServeOptions
from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command, Flags
from tokenspeed.options import ConfigError, options_of

_RUNNER = "tokenspeed.bench.serve"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

_HEAD = """
usage: tokenspeed bench serve [options]

Load a server that speaks OpenAI's protocol with streamed requests, and say how fast it answers. A
key is read from OPENAI_API_KEY or TOKENSPEED_API_KEY. Datasets: random; shared-prefix (groups of
requests with a common beginning); multi-turn (conversations that grow, with pauses for thought);
custom and sharegpt (a file). The exit status is 1 if any request failed.

Examples
  tokenspeed bench serve --num-prompts 100 --request-rate 4 --ignore-eos
  tokenspeed bench serve --base-url https://example.org --backend openai-chat --model NAME
  tokenspeed bench serve --dataset-name multi-turn --num-prompts 32 --max-concurrency 8
  tokenspeed bench serve --goodput ttft:200 tpot:50 --output-json result.json --save-detailed
"""

OPTIONS = {each.name: each for settings in SERVE_GROUPS.values() for each in options_of(settings)}

_PEERS = {
    "prefix_repetition": "shared-prefix",
    "generated-shared-prefix": "shared-prefix",
}
"""Names that other benchmarks have for datasets."""

COMMAND = Command(
    options=tuple(OPTIONS.values()),
    own={},
    headings=(),
)


def main(name: str, argv: list[str]) -> int:
    """The exit status of the measurement; ConfigError for what cannot be taken."""
    topic = pages.wanted(argv)
    if topic is not None:
        groups = SERVE_GROUPS.values()
        print(pages.page(_HEAD, COMMAND.options, {}, topic, common=False, groups=groups))
        return 0
    options = read(argv)
    status: int = importlib.import_module(_RUNNER).serve(options)
    return status


def read(argv: list[str]) -> ServeOptions:
    """The options of a command line (without the command's name). Raises ConfigError."""
    flags = Flags(COMMAND)
    given, words = flags.read([_PEERS.get(word, word) for word in argv])
    if words:
        raise ConfigError(f"takes no {words[0][:100]!r}; the model is given with --model")
    groups: dict[str, Any] = {}
    for group, settings in SERVE_GROUPS.items():
        names = {each.name for each in options_of(settings)} & given.values.keys()
        groups[group] = settings(**{name: given.values[name] for name in names})
    return ServeOptions(**groups)
