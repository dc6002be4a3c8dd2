"""`run_server`: an engine's client, the text side and the HTTP server, from start to end.

Probes are answered while the model loads. Whatever ends the server ends the engine process too.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import time
from collections.abc import Callable, Coroutine

from tokenspeed.config import Config, ModelConfig
from tokenspeed.engine.attached import AttachedClient, EngineDead, EngineRefused
from tokenspeed.engine.frozen import freeze_for, thaw
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.parsers.chat_plan import parser_names
from tokenspeed.server.app import create_app
from tokenspeed.server.coordinator_messages import EngineGone, Reload, Started
from tokenspeed.server.errors import engine_failed, unavailable
from tokenspeed.server.http_server import CLOSE_S, HttpServer
from tokenspeed.server.lifecycle import (
    LAST_EVENTS_S,
    Signals,
    drain,
    first_of,
    stop_streams,
    until_engine_dies,
)
from tokenspeed.server.listener import url_of
from tokenspeed.server.load_log import log_load
from tokenspeed.server.offload import Offload
from tokenspeed.server.siblings import Siblings, SiblingsFailed
from tokenspeed.server.state import ServerState
from tokenspeed.server.tls import renew_certificate, tls_context
from tokenspeed.spans import carried, span
from tokenspeed.text.errors import ModelError
from tokenspeed.text.text_side import TextSide, load_text_side

DEATH_GRACE_S = 1.0
"""How long a server without an engine still answers, so that clients and probes learn of it."""

LoadText = Callable[[ModelConfig], TextSide]


async def run_server(
    config: Config,
    client: AttachedClient,
    listener: socket.socket,
    siblings: Siblings,
    *,
    began: float,
    load_text: LoadText = load_text_side,
) -> int:
    """Serve on a listening socket with a client and siblings that have been started; all are closed
    at the end. `began`: when the start-up did, on the monotonic clock. The exit code; ConfigError
    for settings or a model that cannot be taken.
    """
    tls = tls_context(config.server)
    url = url_of(listener, is_tls=tls is not None)
    _warn_if_open(config, listener)
    state = ServerState(config, client, siblings.shared)
    signals = Signals(_on_hangup(reload_of(state, tls), siblings))
    with span("http.app"):
        app = create_app(state)
    server = HttpServer(app, listener, config.server, tls)
    with signals.installed():
        try:
            ends = (signals.first.wait, server.ended, siblings.watch)
            start = _start_up(state, siblings, load_text, url, began)
            await first_of(*(end() for end in ends), start)
            if not signals.first.is_set():
                await first_of(*(end() for end in ends), *_watches(state))
            return await _end(state, signals, siblings)
        except SiblingsFailed as error:
            logger.error("%s", error)
            signals.second.set()
            stopping = stop_streams(state, unavailable("The server has shut down.", "shutdown"))
            await asyncio.gather(stopping, siblings.end(signals.second, 0.0))
            return 1
        except (EngineRefused, ModelError) as error:
            raise ConfigError(str(error)) from error
        except EngineDead as error:
            logger.error("%s", error)
            return 1
        finally:
            thaw(state)
            await siblings.close()
            await client.close()
            await server.stop()


def reload_of(state: ServerState, tls: ssl.SSLContext | None) -> Callable[[], None] | None:
    """Reads again what SIGHUP is for, if there is anything."""
    server = state.config.server
    if server.api_key_file is None and tls is None:
        return None

    def reload() -> None:
        state.keys.reload()
        if tls is not None:
            renew_certificate(tls, server)

    return reload


def _on_hangup(reload: Callable[[], None] | None, siblings: Siblings) -> Callable[[], None] | None:
    """What SIGHUP does, if anything."""
    if reload is None:
        return None

    def reload_all() -> None:
        reload()
        siblings.tell(Reload())

    return reload_all


async def loaded_text(state: ServerState, load_text: LoadText) -> TextSide:
    """Return when text side and engine are there. Raises EngineDead or ModelError."""
    # A thread of its own, without a limit in time: a tokenizer may have to be fetched first.
    load = carried(span("tokenizer.load")(load_text))
    loading = Offload(threads=1, deadline_s=None).run(load, state.config.model)
    text, _ = await asyncio.gather(loading, state.client.wait_ready())
    return text


async def _start_up(
    state: ServerState, siblings: Siblings, load_text: LoadText, url: str, began: float
) -> None:
    """Return when requests can be served, by all processes. Raises EngineDead or ModelError."""
    with span("http.ready"):
        text = await loaded_text(state, load_text)
        await siblings.wait_serving()
    if text.defaults:
        shown = ", ".join(f"{name} {value:g}" for name, value in text.defaults.items())
        logger.info("sampling defaults of the model: %s (--generation-config none: no such)", shown)
    reasoning, _ = parser_names(state.config.output, text)
    _, tools = parser_names(state.config.output, text, text.tool_template)
    logger.info("reasoning is parsed as %s, tool calls as %s", reasoning, tools)
    state.text = text
    freeze_for(state)
    siblings.note_started(Started(state.client.phases.phases))
    ready = state.client.ready
    if ready is not None and text.tokenizer is not None:
        _warn_if_short(text, ready.max_model_len)
    summary = f" ({ready.summary})" if ready is not None and ready.summary else ""
    seconds = time.monotonic() - began
    logger.info("ready in %.1f s at %s, model %s%s", seconds, url, state.names[0], summary)


def _warn_if_short(text: TextSide, max_model_len: int) -> None:
    if (shortest := text.shortest_chat()) >= max_model_len:
        logger.warning(
            "every chat is refused: the chat template alone takes %d tokens, and the context has "
            "%d; raise --max-total-tokens or --max-model-len to more than %d",
            *(shortest, max_model_len, shortest),
        )


def _watches(state: ServerState) -> list[Coroutine[None, None, None]]:
    """What goes on while the server serves; it ends when the engine does."""
    interval_s = state.config.server.log_stats_interval
    logs = [log_load(state.client, interval_s)] if interval_s else []
    return [until_engine_dies(state), *logs]


async def _end(state: ServerState, signals: Signals, siblings: Siblings) -> int:
    """End everywhere what runs, after a signal (0) or after the engine's death (1)."""
    seconds = state.config.server.drain_timeout
    if state.client.state == "dead":
        logger.error("the engine is dead: %s", state.client.failure)
        siblings.tell(EngineGone(state.client.failure or "the engine is gone"))
        seconds = DEATH_GRACE_S
    ending = siblings.end(signals.second, seconds + LAST_EVENTS_S + CLOSE_S)
    status, _ = await asyncio.gather(wind_down(state, signals), ending)
    return status


async def wind_down(state: ServerState, signals: Signals) -> int:
    """End what runs in this process; its exit code."""
    if state.client.state != "dead":
        await drain(state, signals)
        return 0
    await stop_streams(state, engine_failed("The engine stopped while it worked on this request."))
    await asyncio.sleep(DEATH_GRACE_S)
    return 1


def _warn_if_open(config: Config, listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    has_keys = config.server.api_key or config.server.api_key_file
    if not has_keys and not ipaddress.ip_address(address).is_loopback:
        logger.warning("%s is reachable from outside and no --api-key is set", address)
