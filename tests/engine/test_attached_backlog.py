"""A client that is behind takes what has come together, and says the same as one that is not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from tokenspeed.config import Config
from tokenspeed.engine import attached
from tokenspeed.engine.attached import AttachedClient, EngineDead
from tokenspeed.engine.deltas import joined
from tokenspeed.engine.messages import Failed, Ready, Stats, StepOutputs
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    RequestDelta,
    SamplingParams,
    TokenLogprob,
)
from tokenspeed.timeline import Timing

READY = Ready(
    max_model_len=99,
    vocab_size=99,
    num_pages=1,
    block_size=16,
    kv_cache_dtype="float32",
    seconds=0.0,
    settings=Config(),
    reasons={},
)


class Recorder:
    def __init__(self) -> None:
        self.deltas: list[RequestDelta] = []
        self.error: Exception | None = None

    def put(self, delta: RequestDelta) -> None:
        self.deltas.append(delta)

    def fail(self, error: Exception) -> None:
        self.error = error

    @property
    def ids(self) -> list[int]:
        return [id for delta in self.deltas for id in delta.token_ids]


class Engine:
    """The other end of the socket."""

    def __init__(self, folder: Path) -> None:
        self.address = f"ipc://{folder}/engine"
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.address)

    async def meet(self, client: AttachedClient) -> None:
        client.attach(self.address)
        self._client, _ = await self._socket.recv_multipart()
        await self.send(READY)
        await client.wait_ready()

    async def send(self, *messages: Any) -> None:
        for message in messages:
            await self._socket.send_multipart([self._client, msgspec.msgpack.encode(message)])

    def send_now(self, message: Any) -> None:
        socket: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        socket.send_multipart([self._client, msgspec.msgpack.encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[Engine]:
    made = Engine(tmp_path)
    yield made
    made.close()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[AttachedClient]:
    made = AttachedClient()
    await engine.meet(made)
    yield made
    await made.close()


def step(number: int, *deltas: RequestDelta) -> StepOutputs:
    return StepOutputs(list(deltas), Stats(steps=number))


def delta(id: str, token: int, **fields: Any) -> RequestDelta:
    return RequestDelta(request_id=id, token_ids=[token], **fields)


def submit(client: AttachedClient, *ids: str) -> list[Recorder]:
    sinks = [Recorder() for _ in ids]
    for id, sink in zip(ids, sinks, strict=True):
        client.submit(GenerateRequest(id=id, prompt_ids=[1], params=SamplingParams()), sink)
    return sinks


async def until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.01)


async def test_what_comes_alone_is_handed_out_alone(engine: Engine, client: AttachedClient) -> None:
    (sink,) = submit(client, "a")
    for number in range(5):
        await engine.send(step(number, delta("a", number)))
        await until(lambda expected=number + 1: len(sink.deltas) == expected)
    assert sink.ids == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("num_steps", [3, attached.MAX_AT_ONCE, 5 * attached.MAX_AT_ONCE + 3])
async def test_what_waits_is_taken_together(
    engine: Engine, client: AttachedClient, monkeypatch: pytest.MonkeyPatch, num_steps: int
) -> None:
    first, second = submit(client, "a", "b")
    seen: list[int] = []
    client.on_stats = lambda before, now: seen.append(now.steps)
    last = {"finish_reason": FinishReason.LENGTH}
    steps = [step(n, delta("a", n), delta("b", -n)) for n in range(num_steps - 1)]
    end = step(num_steps - 1, delta("a", num_steps - 1, **last), delta("b", 1 - num_steps))
    held = held_up(engine, [*steps, end])
    await held
    await until(lambda: len(second.ids) == num_steps)
    assert first.ids == list(range(num_steps)) and second.ids == [-n for n in range(num_steps)]
    assert first.deltas[-1].finish_reason is FinishReason.LENGTH
    assert seen == list(range(num_steps)), "each step is counted"
    assert len(first.deltas) <= 2 + num_steps // attached.MAX_AT_ONCE
    client.withdraw("b")


class Relay(Recorder):
    """Has the engine send one more step while it takes one: an engine that is always ahead."""

    def __init__(self, engine: Engine, moments: list[str]) -> None:
        super().__init__()
        self.taken = asyncio.Event()
        self._engine, self._moments = engine, moments

    def put(self, delta: RequestDelta) -> None:
        super().put(delta)
        self._moments.append("taken")
        self.taken.set()
        self._engine.send_now(step(0, RequestDelta(request_id="a", token_ids=[1])))
        time.sleep(0.005)  # until it is there


async def test_what_was_taken_is_written_before_more_is(
    engine: Engine, client: AttachedClient
) -> None:
    """However fast the engine is: or its streams would stand still until it pauses."""
    moments: list[str] = []
    relay = Relay(engine, moments)
    client.submit(GenerateRequest(id="a", prompt_ids=[1], params=SamplingParams()), relay)

    async def write() -> None:
        for _ in range(5):
            await relay.taken.wait()
            relay.taken.clear()
            moments.append("written")

    writing = asyncio.create_task(write())
    await engine.send(step(0, delta("a", 1)))
    await asyncio.wait_for(writing, 5)
    assert moments[:10] == ["taken", "written"] * 5
    client.withdraw("a")


async def held_up(engine: Engine, messages: list[Any]) -> None:
    """Send, while the event loop has no time to read."""
    await engine.send(*messages)
    await asyncio.to_thread(lambda: None)


@pytest.mark.parametrize("reason", [FinishReason.ERROR, FinishReason.ABORT])
async def test_a_failure_takes_nothing_along(
    engine: Engine, client: AttachedClient, reason: FinishReason
) -> None:
    bad, good = submit(client, "bad", "good")
    failure = RequestDelta(request_id="bad", finish_reason=reason, error="no page")
    await held_up(
        engine, [step(0, delta("bad", 1), delta("good", 2)), step(1, failure, delta("good", 3))]
    )
    await until(lambda: len(good.ids) == 2 and bad.deltas[-1].finish_reason)
    assert bad.ids == [1] and bad.deltas[-1].error == "no page"
    client.withdraw("good")


async def test_what_came_before_the_end_of_the_engine_is_handed_out(
    engine: Engine, client: AttachedClient
) -> None:
    (sink,) = submit(client, "a")
    await held_up(engine, [step(0, delta("a", 7)), Failed("it broke"), step(1, delta("a", 8))])
    await until(lambda: sink.error is not None)
    assert sink.ids == [7] and isinstance(sink.error, EngineDead)
    assert client.failure == "it broke"


scores = st.builds(TokenLogprob, st.integers(0, 9), st.just(-1.0), st.just([]))
deltas = st.lists(
    st.builds(
        RequestDelta,
        request_id=st.just("a"),
        token_ids=st.lists(st.integers(0, 99), max_size=3),
        logprobs=st.none() | st.lists(scores, max_size=3),
        num_cached_tokens=st.integers(0, 3),
        timing=st.none() | st.builds(Timing, queue_s=st.floats(0, 9)),
    ),
    min_size=1,
    max_size=6,
)


one_or_more = st.lists(st.integers(0, 99), min_size=1, max_size=2)
tokens_alone = st.builds(RequestDelta, request_id=st.just("a"), token_ids=one_or_more)
steps = st.lists(
    st.lists(st.tuples(st.sampled_from("abc"), tokens_alone | deltas.map(joined)), max_size=4),
    max_size=5,
)


@given(steps)
def test_what_travels_packed_arrives_the_same(steps: list[list[tuple[str, RequestDelta]]]) -> None:
    sent: dict[str, list[RequestDelta]] = {}
    news = attached._News()
    for number, pairs in enumerate(steps):
        named = [msgspec.structs.replace(each, request_id=id) for id, each in pairs]
        for each in named:
            sent.setdefault(each.request_id, []).append(each)
        wire = msgspec.msgpack.encode(step(number, *named).packed())
        news.add(msgspec.msgpack.decode(wire, type=StepOutputs))
    assert {id: joined(each) for id, each in news.deltas.items()} == {
        id: joined(each) for id, each in sent.items()
    }


def test_what_is_tokens_and_nothing_else_is_packed() -> None:
    told = step(0, delta("a", 1), delta("b", 2, num_cached_tokens=3), delta("b", 4), delta("c", 5))
    packed = told.packed()
    assert (packed.ids, packed.tokens) == (["a", "c"], [1, 5])
    assert packed.deltas == told.deltas[1:3], "none gets ahead of another of its request"


@given(deltas, st.data())
def test_joining_in_parts_is_joining_all(parts: list[RequestDelta], data: st.DataObject) -> None:
    parts[-1].finish_reason, parts[-1].stop_token = FinishReason.STOP, 5
    parts[0].prompt_logprobs = [None]
    whole = joined(parts)
    at = data.draw(st.integers(1, len(parts)))
    assert joined([joined(parts[:at]), *parts[at:]]) == whole
    assert whole.token_ids == [id for part in parts for id in part.token_ids]
    assert (whole.finish_reason, whole.stop_token) == (FinishReason.STOP, 5)
    assert whole.prompt_logprobs == [None]
