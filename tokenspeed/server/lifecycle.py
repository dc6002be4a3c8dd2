"""From the first signal to the end: new work is refused, running work gets its time, then all ends.

Hypercorn's own shutdown waits for open connections (without limit on Python 3.12 and later), so
the drain is done here, and Hypercorn is only asked to stop when nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

from tokenspeed.log import logger
from tokenspeed.server.errors import APIError, unavailable
from tokenspeed.server.state import ServerState
from tokenspeed.wording import counted

LAST_EVENTS_S = 2.0
"""How long ended streams may take to write their last event."""
DEATH_CHECK_S = 0.2

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """`first` is set by the first SIGTERM or SIGINT, `second` by the next. SIGHUP calls
    `on_hangup`; without one it ends the process, as everywhere.
    """

    def __init__(self, on_hangup: Callable[[], None] | None = None) -> None:
        self._on_hangup = on_hangup
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def notice(self) -> None:
        (self.second if self.first.is_set() else self.first).set()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys(SIGNALS, self.notice)
        if self._on_hangup is not None:
            handlers[signal.SIGHUP] = self._on_hangup
        before = {number: signal.getsignal(number) for number in handlers}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)  # which leaves the default, not what was there
                signal.signal(number, before[number])


async def drain(state: ServerState, signals: Signals) -> None:
    """Let running requests end until the deadline or a second signal; then end them with an error
    event. In a paused engine none would end.
    """
    began, is_paused, num_requests = (
        time.monotonic(),
        state.client.stats.is_paused,
        state.num_active,
    )
    state.draining = True
    seconds = state.config.server.drain_timeout
    if num_requests and not is_paused:
        what = "draining: %d running requests get %g s; a second signal ends them now"
        logger.info(what, num_requests, seconds)
        await first_of(state.idle.wait(), signals.second.wait(), timeout=seconds)
    num_cut = state.num_active
    await stop_streams(state, unavailable("The server has shut down.", "shutdown"))
    told = "no request was running"
    if num_requests:
        seconds = time.monotonic() - began
        num_ended = max(num_requests - num_cut, 0)
        told = f"{counted(num_ended, 'request')} ended in {seconds:.1f} s, {num_cut} cut short"
    logger.info("stopping: %s%s", told, " (paused, none could end)" if is_paused else "")


async def stop_streams(state: ServerState, error: APIError) -> None:
    """End whatever runs with `error`, and give it a moment to be written."""
    state.stop_all(error)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LAST_EVENTS_S):
            await state.idle.wait()


async def until_engine_dies(state: ServerState) -> None:
    """Meanwhile an engine that hangs is logged, once each time, by the first process."""
    was_stalled = False
    while state.client.state != "dead":
        is_stalled = state.phase == "stalled"
        if is_stalled and not was_stalled and state.shared.number == 0:
            logger.error(
                "the engine has ended no step for %.0f s (--watchdog-timeout): /ready and new "
                "requests get 503 until it does",
                state.stalled_s,
            )
        was_stalled = is_stalled
        await asyncio.sleep(DEATH_CHECK_S)


async def first_of(*waits: Awaitable[object], timeout: float | None = None) -> None:
    """Return when one of them has ended, or after `timeout`; cancels the others. Raises what the
    ended ones raised.
    """
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
