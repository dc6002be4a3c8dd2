"""`tokenspeed serve MODEL`: read the settings, then hand over to the server."""

from __future__ import annotations

import importlib
import os
import signal

from tokenspeed.cli import pages
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import resolve
from tokenspeed.config import OPTIONS
from tokenspeed.log import logger, setup_logging
from tokenspeed.server_config import ServerConfig
from tokenspeed.spans import process_import, span

_SERVER = "tokenspeed.server.serve"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

_HEAD = """
usage: tokenspeed serve [MODEL] [options]

Serve MODEL through an OpenAI-compatible API until it is told to stop (Ctrl-C or SIGTERM).
MODEL is a local folder, a GGUF file, a hub id, or smollm2, the bundled default.

Examples
  tokenspeed serve                                    the bundled model on 127.0.0.1:8000
  tokenspeed serve ./folder --max-model-len 4k        a folder with config.json and safetensors
  tokenspeed serve model.gguf --served-model-name m   one GGUF file, shown as "m"
  TOKENSPEED_API_KEY=secret tokenspeed serve --host 0.0.0.0   for others, with a key
  tokenspeed serve --config serve.yaml --print-config what would be used, and why

Any option can also stand in a settings file (--config) or in a variable TOKENSPEED_<OPTION>; the
command line wins over the file, the file over the variables.
"""


def main(argv: list[str]) -> int:
    """The exit status of the server; ConfigError for settings that cannot be taken."""
    topic = pages.wanted(argv)
    if topic is not None:
        print(pages.page(_HEAD, list(OPTIONS.values()), {}, topic))
        return 0
    resolved = resolve(argv, os.environ)
    if "--print-config" in resolved.own:
        print_settled(resolved, with_text=True)
        return 0
    _outlive_hangups(resolved.config.server)
    setup_logging(resolved.config.server.log_level)
    for note in resolved.notes:
        logger.info("%s", note)
    process_import()
    with span("process.import"):
        server = importlib.import_module(_SERVER)
    status: int = server.serve(resolved.config)
    return status


def _outlive_hangups(server: ServerConfig) -> None:
    """Until the server is there to read its files again: it reads them for the first time yet."""
    if server.api_key_file is not None or server.ssl_certfile is not None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
