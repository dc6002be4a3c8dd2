"""A few threads for work that must not run on the event loop: chat templates and tokenizing.

Bounded in every direction: a number of threads, a number of waiting calls, and a deadline. Python
cannot stop a thread, so a call that passes its deadline, or whose caller has left, keeps its
thread, and a new one takes its place; the threads are daemons and never hold up the end of the
process.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

MAX_LOST_THREADS = 16


class Overrun(Exception):
    """The call passed its deadline while it ran."""


class Overfull(Exception):
    """Too many calls wait already, or too many threads are lost to endless ones."""


class _Call:
    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args
        self.future: Future[Any] = Future()
        self._end = threading.Lock()

    def claim_end(self) -> bool:
        """True for whoever comes first: the thread that ended the call, or who gave it up."""
        return self._end.acquire(blocking=False)


class Offload:
    """`await offload.run(function, *args)` runs the call in one of `threads` threads."""

    def __init__(
        self, *, deadline_s: float | None, threads: int = 2, max_waiting: int = 1024
    ) -> None:
        self._calls: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._max_waiting = max_waiting
        self._deadline_s = deadline_s
        self._lost: list[Future[Any]] = []
        for _ in range(threads):
            self._start_thread()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """The function's result. Raises what it raises, `Overrun` or `Overfull`."""
        self._lost = [future for future in self._lost if not future.done()]
        if self._calls.qsize() >= self._max_waiting or len(self._lost) >= MAX_LOST_THREADS:
            raise Overfull
        call = _Call(function, args)
        self._calls.put(call)
        try:
            async with asyncio.timeout(self._deadline_s):
                result: T = await asyncio.wrap_future(call.future)
            return result
        except TimeoutError:
            if call.future.cancelled():  # it never got a thread
                raise Overfull from None
            self._give_up(call)
            raise Overrun from None
        except asyncio.CancelledError:
            if not call.future.cancelled():
                self._give_up(call)
            raise

    def _give_up(self, call: _Call) -> None:
        """A running call is waited for no longer: its thread is lost until it comes to an end."""
        if call.claim_end():
            self._lost.append(call.future)
            self._start_thread()

    def _start_thread(self) -> None:
        threading.Thread(target=_work, args=(self._calls,), name="offload", daemon=True).start()


def _work(calls: queue.SimpleQueue[_Call]) -> None:
    """A thread of the pool; it ends with the first call that was given up."""
    while True:
        call = calls.get()
        if not call.future.set_running_or_notify_cancel():
            continue
        try:
            result = call.function(*call.args)
        except Exception as error:
            call.future.set_exception(error)
        except BaseException as error:  # such as a panic of a library's Rust: it ends no thread
            failure = RuntimeError(f"{type(error).__name__} in a thread: {error}")
            failure.__cause__ = error
            call.future.set_exception(failure)
        else:
            call.future.set_result(result)
        if not call.claim_end():
            return
        del call  # or its arguments would live until the next one comes
