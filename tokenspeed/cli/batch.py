"""`tokenspeed batch`: read the settings, then hand the files over to the batch runner."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping

from tokenspeed.cli import pages
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import COMMON, resolve
from tokenspeed.config import OPTIONS
from tokenspeed.log import logger, setup_logging
from tokenspeed.options import ConfigError, options_of
from tokenspeed.peers.answers import Takes
from tokenspeed.peers.table import TABLE
from tokenspeed.server_config import ServerConfig

_RUNNER = "tokenspeed.server.batch"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

MAX_CONCURRENCY = 65536

_HEAD = """
usage: tokenspeed batch -i FILE -o FILE [MODEL] [options]

Answer a file of OpenAI batch requests without a server: a JSON object a line with custom_id,
method, url (/v1/chat/completions, /v1/completions, /v1/responses or /v1/messages) and body. Answers
are appended to the output as they come; started again with the same files, it goes on where it
stopped: lines with an answer are skipped. (To have a failed line tried again, take its answer out
of the output.) A terminal shows a bar, a log has a line every --log-stats-interval seconds. The
exit status is 1 if any line failed, in this run or in one before.

Examples
  tokenspeed batch -i requests.jsonl -o answers.jsonl
  tokenspeed batch ./folder -i requests.jsonl -o - --max-num-seqs 16 > answers.jsonl
"""

_OWN = {
    "-i, --input-file FILE": "requests; - is standard input",
    "-o, --output-file FILE": "answers; - is standard output",
    "--concurrency N": "lines given to the engine at once, of which --max-num-seqs run "
    "(default: twice as many, so that the next are at hand)",
}

_OF_SERVER = (
    *("engine_startup_timeout", "max_request_bytes", "strict_fields", "log_level"),
    *("served_model_name", "max_queued_requests", "max_queued_tokens", "log_stats_interval"),
)
_NOT_OURS = {option.name for option in options_of(ServerConfig)} - set(_OF_SERVER)

COMMAND = Command(
    options=tuple(option for option in OPTIONS.values() if option.name not in _NOT_OURS),
    own={
        **COMMON,
        **dict.fromkeys(("-i", "--input-file", "-o", "--output-file", "--concurrency"), Takes.ONE),
    },
    headings=tuple(heading for heading in TABLE if heading != "Server"),
    is_unwatched=True,
)


def main(argv: list[str]) -> int:
    """The exit status of the run; ConfigError for settings that cannot be taken."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page(_HEAD, COMMAND.options, _OWN, topic))
        return 0
    resolved = resolve(argv, os.environ, COMMAND)
    if "--print-config" in resolved.own:
        print_settled(resolved, with_text=True)
        return 0
    in_path = _path(resolved.own, "-i", "--input-file")
    out_path = _path(resolved.own, "-o", "--output-file")
    concurrency = _concurrency(resolved.own)
    setup_logging(resolved.config.server.log_level)
    for note in resolved.notes:
        logger.info("%s", note)
    runner = importlib.import_module(_RUNNER)
    status: int = runner.batch(resolved.config, in_path, out_path, concurrency=concurrency)
    return status


def _path(own: Mapping[str, tuple[str, ...]], short: str, long: str) -> str:
    words = own.get(long) or own.get(short)
    if not words or not words[0]:
        raise ConfigError(f"needs {short} FILE ({long})")
    return words[0]


def _concurrency(own: Mapping[str, tuple[str, ...]]) -> int | None:
    if "--concurrency" not in own:
        return None
    text = own["--concurrency"][0]
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= MAX_CONCURRENCY:
        raise ConfigError(f"--concurrency must be from 1 to {MAX_CONCURRENCY}, got {text[:100]!r}")
    return int(text)
