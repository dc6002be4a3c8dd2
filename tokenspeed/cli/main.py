"""`tokenspeed COMMAND ...`: find the command's module by name and call its `main`.

Modules are named as strings and imported only when chosen, so `--help` stays quick and nothing
heavy is loaded for it.
"""

from __future__ import annotations

import importlib
import sys

from tokenspeed.cli.output import OutputLost, watched_stdout
from tokenspeed.options import ConfigError, suggest

COMMANDS = {
    "serve": ("tokenspeed.cli.serve", "serve a model through an OpenAI-compatible API"),
    "batch": ("tokenspeed.cli.batch", "run a file of OpenAI batch requests, without a server"),
    "warmup": ("tokenspeed.cli.warmup", "compile a model into the cache, without its weights"),
    "explain": (
        "tokenspeed.cli.explain",
        "what the compiler made of a model, and whether it is right",
    ),
    "cache": (
        "tokenspeed.cli.cache",
        "list, explain, check, prune, export, import compiled models",
    ),
    "bench": (
        "tokenspeed.cli.bench",
        "measure a server, the engine alone, or where a start's time goes",
    ),
    "env": ("tokenspeed.cli.env", "print what a bug report should say about this machine"),
    "version": ("tokenspeed.cli.version", "print the version"),
}

_WITH_ACTIONS = ("bench", "cache")
"""Commands whose second word is a part of the command."""

_HELP = """usage: tokenspeed COMMAND [options]      (ts is the same)

An LLM inference engine: a model written once as a plain PyTorch module, made fast by a compiler.

Commands
{commands}

First steps
  tokenspeed serve                       the bundled smollm2 on http://127.0.0.1:8000
  tokenspeed serve ./folder --port 9000  a model folder or .gguf file of yours
  tokenspeed warmup ./folder             compile it first, so that serve need not
  tokenspeed help serve                  all options; help serve --port explains one
  tokenspeed serve --help=compat         flags of vLLM and SGLang, and what becomes of them"""


def main(argv: list[str] | None = None) -> int:
    """Run one command; the exit status: 0 well, 1 failed, 2 asked for what cannot be."""
    words = sys.argv[1:] if argv is None else argv
    try:
        with watched_stdout():
            return _run(words)
    except OutputLost as error:
        if not error.by_reader:
            _complain(str(error))
        return 1


def _run(words: list[str]) -> int:
    if words and words[0].startswith("--help="):
        words = ["help", words[0].removeprefix("--help="), *words[1:]]
    if words[:1] == ["help"] and len(words) > 1:
        try:
            words = _asked(words[1:])
        except ConfigError as error:
            _complain(f"help: {error}")
            return 2
    if not words or words[0] in ("-h", "--help", "help"):
        rows = [f"  {name:9} {text}" for name, (_, text) in COMMANDS.items()]
        print(_HELP.format(commands="\n".join(rows)))
        return 0
    command = "version" if words[0] in ("-V", "--version") else words[0]
    if command not in COMMANDS:
        known = ", ".join(COMMANDS)
        hint = suggest(command, COMMANDS)
        if command.startswith("-"):
            hint = "; options stand behind a command, as in: tokenspeed serve --port 8000"
        _complain(f"unknown command {command[:100]}{hint} (known: {known})")
        return 2
    try:
        status: int = importlib.import_module(COMMANDS[command][0]).main(words[1:])
    except ConfigError as error:
        _complain(f"{command}: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _asked(words: list[str]) -> list[str]:
    """`help serve`, `help cache prune`, `help serve --port` or `help serve port` as the words that
    ask for it. Raises ConfigError for more words.
    """
    has_second = words[0] in _WITH_ACTIONS and len(words) > 1 and not words[1].startswith("-")
    command, topics = (words[:2], words[2:]) if has_second else (words[:1], words[1:])
    if len(topics) > 1:
        raise ConfigError(f"explains one option at a time, got also {topics[1][:100]!r}")
    return [*command, f"--help={topics[0]}" if topics else "--help"]


def _complain(message: str) -> None:
    print(f"tokenspeed: error: {message}", file=sys.stderr)
