"""Requests through the engine process: streams, refusals, slow readers, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from engine_reader import generate
from engine_tiny import Outcome, request, run, tiny_config, tiny_engine

from tokenspeed.engine.attached import AttachedClient, EngineDead
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.messages import Abort, Stats
from tokenspeed.request import (
    GenerateRequest,
    InvalidRequest,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(tiny_model: str) -> AsyncIterator[EngineClient]:
    made = EngineClient(tiny_config(tiny_model))
    await made.start()
    try:
        await made.wait_ready()
        yield made
        await until(lambda: is_idle(made))
    finally:
        await made.close()


async def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


async def gather(client: EngineClient, spec: GenerateRequest) -> Outcome:
    outcome = Outcome()
    async for delta in generate(client, spec):
        outcome.push(delta)
    return outcome


def is_idle(client: EngineClient) -> bool:
    stats = client.stats
    return stats.num_running == stats.num_waiting == stats.kv_usage == 0


async def test_streams_equal_the_engine_in_process(client: EngineClient, tiny_model: str) -> None:
    specs = [request(f"q{i}", [9 + i, 50, 3], seed=i, temperature=i % 2) for i in range(6)]
    found = await asyncio.gather(*(gather(client, spec) for spec in specs))
    expected = run(tiny_engine(tiny_model), specs)
    for spec, outcome in zip(specs, found, strict=True):
        assert outcome.token_ids == expected[spec.id].token_ids
        assert outcome.finish_reason == expected[spec.id].finish_reason
        assert len(outcome.logprobs) == len(outcome.token_ids)


async def test_what_cannot_be_served_is_one_request_s_matter(client: EngineClient) -> None:
    too_long = await gather(client, request("long", [5] * 300))
    assert too_long.finish_reason == "error" and "256" in (too_long.error or "")
    outside = await gather(client, request("outside", [5, 199]))
    assert "vocabulary has 199" in (outside.error or "")
    running = generate(client, request("twice", [5, 6], max_tokens=200, ignore_eos=True))
    await anext(running)
    with pytest.raises(InvalidRequest, match="in use"):
        await gather(client, request("twice", [5, 6]))
    await running.aclose()
    assert (await gather(client, request("good", [5, 6]))).error is None


async def test_messages_that_cannot_be_read_are_dropped(client: EngineClient) -> None:
    for body in (b"", b"\x00", b"\xc1" * 50, b"\x81\xa4type\xa6submit", b"\x91" * 100_000):
        await client._socket.send(body)
    await client._socket.send_multipart([b"two", b"frames"])
    assert (await gather(client, request("after", [5, 6]))).error is None


async def test_times_and_steps_are_told(client: EngineClient) -> None:
    told: list[tuple[Stats, Stats]] = []
    client.on_stats = lambda before, after: told.append((before, after))
    spec = request("timed", [15, 16, 17], max_tokens=5, ignore_eos=True)
    deltas = [delta async for delta in generate(client, spec)]
    await until(lambda: is_idle(client))
    client.on_stats = None
    first, last = deltas[0].timing, deltas[-1].timing
    assert first is not None and last is not None
    assert 0 < first.queue_s < 20 and 0 < first.prefill_s < 20
    assert (last.queue_s, last.prefill_s) == (first.queue_s, first.prefill_s)
    assert all(before.steps <= after.steps for before, after in told)
    assert told[-1][1].scheduled_tokens - told[0][0].scheduled_tokens == 3 + 4


async def test_phases_of_the_start_are_known(client: EngineClient) -> None:
    phases = client.phases.phases
    assert phases[0].name == "process" and {"weights", "kv"} <= {each.name for each in phases}
    assert sum(each.seconds for each in phases) > 0.1, "an interpreter starts and imports torch"
    assert client.phases.phases == phases, "they have ended"


async def test_a_hundred_disconnects_leave_nothing(client: EngineClient) -> None:
    async def leave(number: int) -> None:
        spec = request(f"d{number}", [number, 3, 4] * 5, max_tokens=200, ignore_eos=True)
        deltas = generate(client, spec)
        for _ in range(number % 3):
            await anext(deltas)
        if number % 2:
            await deltas.aclose()
            return
        task = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0.002 * (number % 5))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await deltas.aclose()

    spec = request("steady", [8, 9], max_tokens=60, ignore_eos=True)
    alone = await gather(client, spec)
    steady, *_ = await asyncio.gather(gather(client, spec), *(leave(i) for i in range(100)))
    assert steady.token_ids == alone.token_ids
    await until(lambda: is_idle(client))
    assert not client._sinks


async def test_another_client_sees_its_own_and_may_vanish(client: EngineClient) -> None:
    """The engine knows clients by their sockets: what one of them leaves behind is aborted."""
    other = AttachedClient()
    other.attach(client.address)
    await other.wait_ready()
    await until(lambda: other.stats.steps == client.stats.steps > 0)  # told without a step
    spec = request("mine", [5, 6], max_tokens=250, ignore_eos=True)
    deltas = generate(other, spec)
    await anext(deltas)
    assert client.stats.num_running == 1
    await other.close()
    await gather(client, request("steps on", [5, 6], max_tokens=250, ignore_eos=True))
    await until(lambda: is_idle(client))
    with pytest.raises(EngineDead, match="left"):
        await anext(deltas)


async def test_commands_reach_what_other_clients_sent(client: EngineClient) -> None:
    """Everyone is told of a pause before its answer; one job or all are ended, whoever asks, but
    nobody withdraws what is another's.
    """
    other = AttachedClient()
    other.attach(client.address)
    await other.wait_ready()
    specs = [
        request(f"{job}-{sample}", [5, 6], max_tokens=200, ignore_eos=True)
        for job in ("one", "two")
        for sample in range(2)
    ]
    streams = [generate(other, spec) for spec in specs]
    for stream in streams:
        await anext(stream)
    await client.commands.ask("pause")
    assert client.stats.is_paused
    await until(lambda: other.stats.is_paused)
    client._send(Abort(["one-0", "one-1"]))
    assert (await client.commands.ask("abort", "none")).num_jobs == 0
    assert (await client.commands.ask("tell")).num_jobs == client.stats.num_waiting == 0
    assert client.stats.num_running == 4
    assert (await client.commands.ask("abort", "one")).num_jobs == 1
    assert client.stats.num_running == 2
    assert (await client.commands.ask("abort")).num_jobs == 1
    for stream in streams:
        assert [delta async for delta in stream][-1].finish_reason == "abort"
    await other.commands.ask("continue")
    await until(lambda: not client.stats.is_paused)
    await other.close()
    assert (await gather(client, request("after", [5, 6]))).error is None


async def test_who_waits_for_the_end_of_a_pause_is_counted(client: EngineClient) -> None:
    """No step follows what comes and goes then, whose figures would tell of it."""
    other = AttachedClient()
    other.attach(client.address)
    await other.wait_ready()
    await client.commands.ask("pause")
    waiting = [asyncio.create_task(gather(other, request(f"{i}-0", [5, 6]))) for i in range(3)]
    await until(lambda: client.stats.num_waiting == other.stats.num_waiting == 3)
    waiting[1].cancel()
    await until(lambda: client.stats.num_waiting == other.stats.num_waiting == 2)
    await client.commands.ask("continue")
    first, _, last = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, Outcome) and isinstance(last, Outcome)
    assert first.token_ids == last.token_ids != []
    await other.close()


async def test_a_client_that_vanishes_is_noticed_while_nothing_runs(client: EngineClient) -> None:
    other = AttachedClient()
    other.attach(client.address)
    deltas = generate(other, request("mine", [5, 6], max_tokens=200, ignore_eos=True))
    await anext(deltas)
    await client.commands.ask("pause")
    await other.close()
    async with asyncio.timeout(10):
        while client.stats.num_running:
            await client.commands.ask("tell")
    assert client.stats.kv_usage == 0
    await client.commands.ask("continue")
    with pytest.raises(EngineDead, match="left"):
        async for _ in deltas:
            pass
