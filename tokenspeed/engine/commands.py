"""The HTTP process's commands to its engine, each waiting for its answer."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from tokenspeed.engine.messages import Action, Command, Done


class Commands:
    """Lives on one event loop. `send` hands a message over."""

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Done]] = {}
        self._error: Exception | None = None

    async def ask(self, action: Action, job_id: str | None = None, num_steps: int = 0) -> Done:
        """Have a ready engine do something between two steps. Raises what `fail` was given."""
        if self._error is not None:
            raise self._error
        number = next(self._numbers)
        answer: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            self._send(Command(number, action, job_id, num_steps))
            return await answer
        finally:
            del self._waiting[number]

    def put(self, done: Done) -> None:
        """The engine has answered."""
        answer = self._waiting.get(done.number)
        if answer is not None and not answer.done():
            answer.set_result(done)

    def fail(self, error: Exception) -> None:
        """There is no engine any more."""
        self._error = error
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(error)
