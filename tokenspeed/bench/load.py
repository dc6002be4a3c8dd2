"""The load itself: when each session starts, its requests, and the records that come of them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import h11
import msgspec

from tokenspeed.bench.answer import Answer, Record
from tokenspeed.bench.dataset import Message, Prompt, Session, Turn, join
from tokenspeed.bench.http_client import HttpClient
from tokenspeed.bench.serve_options import LoadOptions

Done = Callable[[Record], None]

MAX_TOLD_BYTES = 64 << 10
"""Of the answer to a request that is refused."""


def arrivals(count: int, options: LoadOptions, seed: int) -> Iterator[float]:
    """When each of `count` sessions starts, in seconds. Gaps are gamma-distributed with the mean
    1 / rate and the shape `burstiness` (1: exponential, so a Poisson process; infinite: constant).
    """
    source = random.Random(seed)
    at = 0.0
    for _ in range(count):
        yield at
        if not math.isinf(options.request_rate):
            mean = 1 / options.request_rate
            shape = options.burstiness
            at += mean if math.isinf(shape) else source.gammavariate(shape, mean / shape)


@dataclass(frozen=True, kw_only=True)
class Requests:
    """How a turn becomes a request: endpoint, model, and the fields that all have."""

    endpoint: str
    is_chat: bool
    model: str
    fields: Mapping[str, Any]
    must_be_full: bool
    timeout_s: float

    def body(self, history: Prompt | list[Message], turn: Turn) -> bytes:
        limit = "max_completion_tokens" if self.is_chat else "max_tokens"
        body = {
            "model": self.model,
            "messages" if self.is_chat else "prompt": history,
            limit: turn.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.fields,
        }
        return msgspec.json.encode(body)

    def begin(self, turn: Turn) -> Prompt | list[Message]:
        """What the first request of a session sends."""
        return self._said(turn)

    def go_on(self, history: Any, answer: Answer, turn: Turn) -> Prompt | list[Message]:
        """What a later request sends: all that was said, and what the turn adds."""
        text = answer.record.text
        if self.is_chat:
            return [*history, {"role": "assistant", "content": text}, *self._said(turn)]
        if isinstance(history, str):
            return join(history + text, _prompt(turn))
        return join(join(history, answer.token_ids), _prompt(turn))

    def _said(self, turn: Turn) -> Prompt | list[Message]:
        if not self.is_chat or isinstance(turn.prompt, list):
            return turn.prompt
        return [{"role": "user", "content": turn.prompt}]


def _prompt(turn: Turn) -> Prompt:
    return turn.prompt  # type: ignore[return-value]  # messages are of chat alone


@dataclass
class Load:
    """One run. `records` and `began` are there while it runs, so that a run cut short has them."""

    client: HttpClient
    requests: Requests
    limit: asyncio.Semaphore | contextlib.nullcontext[None]
    on_done: Done = lambda record: None
    records: list[Record] = field(default_factory=list)
    began: float = 0.0

    async def run(self, sessions: Sequence[Session], starts: Iterable[float]) -> None:
        """All sessions, each at its time. Nothing is raised for a request that fails."""
        self.began = time.perf_counter()
        async with asyncio.TaskGroup() as tasks:
            for number, (session, start) in enumerate(zip(sessions, starts, strict=False)):
                wait = self.began + start - time.perf_counter()
                if wait > 0:
                    await asyncio.sleep(wait)
                tasks.create_task(self._session(number, session))

    async def _session(self, number: int, session: Session) -> None:
        history: Any = None
        answer: Answer | None = None
        for index, (turn, pause) in enumerate(zip(session.turns, session.think_s, strict=True)):
            if pause:
                await asyncio.sleep(pause)
            if answer is None:
                history = self.requests.begin(turn)
            else:
                history = self.requests.go_on(history, answer, turn)
            async with self.limit:
                answer = await self.ask(history, turn, number, index)
            self.records.append(answer.record)
            self.on_done(answer.record)
            if answer.record.failure is not None:
                return  # what would follow has nothing to build on

    async def ask(self, history: Any, turn: Turn, session: int, index: int) -> Answer:
        """One request, to the end of its answer or to its failure."""
        requests = self.requests
        body = requests.body(history, turn)
        sent = time.perf_counter()
        record = Record(
            session=session,
            turn=index,
            start=sent - self.began,
            input_len=turn.input_len,
            max_tokens=turn.max_tokens,
        )
        answer = Answer(record, must_be_full=requests.must_be_full)
        try:
            async with asyncio.timeout(requests.timeout_s):
                await self._read(body, answer, sent)
        except TimeoutError:
            answer.fail("timeout", f"after {requests.timeout_s:g} s")
        except h11.RemoteProtocolError as error:
            answer.fail("cut stream", str(error))
        except OSError as error:
            answer.fail("connection", str(error) or type(error).__name__)
        answer.finish()
        return answer

    async def _read(self, body: bytes, answer: Answer, sent: float) -> None:
        async with self.client.request("POST", self.requests.endpoint, body) as response:
            if response.status != 200:
                told = await response.read(MAX_TOLD_BYTES)
                answer.fail(f"HTTP {response.status}", told.decode(errors="replace"))
                return
            async for block in response.blocks:
                answer.feed(block, time.perf_counter() - sent)
                if answer.record.failure is not None:
                    return  # nothing more can mend it, and it may have no end


def limit_of(max_concurrency: int | None) -> asyncio.Semaphore | contextlib.nullcontext[None]:
    return (
        contextlib.nullcontext() if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    )


def num_requests(sessions: Iterable[Session]) -> int:
    return sum(len(session.turns) for session in sessions)


def warm_ups(sessions: Sequence[Session], count: int) -> list[Session]:
    """The first turns of the first sessions, in a circle."""
    chosen = itertools.islice(itertools.cycle(sessions), count)
    return [Session(session.turns[:1], [0.0]) for session in chosen]
