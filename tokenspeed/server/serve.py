"""`serve(config)`: the port, then the engine's process, and only then what this one needs itself.

The port is bound before anything is loaded, so that a taken one is found at once. The engine's
process takes longest, since it imports torch: this one imports its own modules meanwhile.
"""

from __future__ import annotations

import asyncio
import importlib
import resource
import socket
import time

import uvloop

from tokenspeed.config import Config
from tokenspeed.engine.attached import EngineDead
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.restarts import Restarts
from tokenspeed.log import logger
from tokenspeed.server.garbage import collect_rarely
from tokenspeed.server.keys import keys_of
from tokenspeed.server.listener import listen
from tokenspeed.server.siblings import Siblings
from tokenspeed.server.tls import tls_context
from tokenspeed.server_config import ServerConfig
from tokenspeed.spans import span

MAX_FILES = 1 << 16
HOUR_S = 3600.0

_RUN = "tokenspeed.server.run"
_CHECKS = "tokenspeed.server.checks"


def serve(config: Config) -> int:
    """Serve until a signal or a failure; the process's exit code. Raises ConfigError for settings
    or a model that cannot be taken.
    """
    server = config.server
    check_files(server)
    try:
        listener = listen(server.host, server.port, server.write_timeout)
    except OSError as error:
        logger.error(
            "cannot listen on %s port %d: %s; choose another with --host or --port",
            server.host,
            server.port,
            error.strerror or error,
        )
        importlib.import_module(_CHECKS).check_local(config.model)  # or it were the next complaint
        return 1
    _raise_file_limit()
    collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(config, listener))


def check_files(server: ServerConfig) -> None:
    """Raise ConfigError for files with keys and certificates that cannot be used."""
    keys_of(server)
    tls_context(server)


def _raise_file_limit() -> None:
    """Each stream is an open file. The usual limit of 1,024 is there for programs that call
    select(), which this one does not: take what may be had.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: Config, listener: socket.socket) -> int:
    began = time.monotonic()
    client = EngineClient(config, Restarts(config.server.engine_restarts, HOUR_S))
    try:
        await client.start()
    except EngineDead as error:
        logger.error("%s", error)
        listener.close()
        return 1
    siblings = Siblings(config, client, listener)
    try:
        siblings.start()
        with span("process.import"):
            run = importlib.import_module(_RUN)
    except BaseException:
        await siblings.close()
        await client.close()
        raise
    status: int = await run.run_server(config, client, listener, siblings, began=began)
    return status
