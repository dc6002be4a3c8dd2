"""What siblings ask the first process for; no engine is run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from server_fakes import ANSWER, Asker, FakeClient, make_state
from test_server_responses import respond

from tokenspeed.engine.phases import Phase
from tokenspeed.server import coordinator_client as coordinator_client_module
from tokenspeed.server.coordinator import Coordinator
from tokenspeed.server.coordinator_client import CoordinatorClient
from tokenspeed.server.coordinator_messages import Drain, EngineGone, FromCoordinator, Ping, Started
from tokenspeed.server.errors import APIError
from tokenspeed.server.key_places import KeyCounts
from tokenspeed.server.queue_table import QueueTable
from tokenspeed.server.response_store import ResponseStore
from tokenspeed.server.sharing import Shared


class Two:
    """The first process's coordinator, and siblings at it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = ResponseStore(1 << 20, 10.0)
        self.serving: list[int] = []
        self.words: dict[int, list[FromCoordinator]] = {}
        self.places = KeyCounts()
        self.alive: list[int] = []
        heard = (self.serving.append, self.alive.append)
        self.coordinator = Coordinator(folder, self.store, self.places, *heard)
        self.tasks = [asyncio.create_task(self.coordinator.serve())]
        self.clients: list[CoordinatorClient] = []

    def sibling(self, number: int) -> CoordinatorClient:
        client = CoordinatorClient(self.folder, number, is_on=True)
        self.coordinator.admit(number)
        self.clients.append(client)
        words: list[FromCoordinator] = []
        self.words[number] = words
        self.tasks.append(asyncio.create_task(client.listen(words.append)))
        return client


@pytest_asyncio.fixture
async def two(tmp_path: Path) -> AsyncIterator[Two]:
    made = Two(tmp_path)
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)
    for each in (*made.clients, made.coordinator):
        each.close()


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_what_one_keeps_another_finds(two: Two) -> None:
    one, other = two.sibling(1), two.sibling(2)
    assert await one.get("a") is None and not await one.delete("a")
    assert await one.put("a", b"answer", b"items")
    kept = await other.get("a")
    assert kept is not None and (kept.answer, kept.items) == (b"answer", b"items")
    assert not await other.put("b", b"x" * (1 << 20), b"")
    many = await asyncio.gather(*(other.put(f"m{i}", bytes([i]), b"") for i in range(50)))
    assert all(many)
    found = await asyncio.gather(*(one.get(f"m{i}") for i in range(50)))
    assert [each and each.answer for each in found] == [bytes([i]) for i in range(50)]
    assert await other.delete("a") and await one.get("a") is None
    asking = asyncio.create_task(one.get("m1"))
    await asyncio.sleep(0)
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    assert await one.get("m2") is not None and not one._waiting


async def test_words_reach_whom_they_are_for(two: Two) -> None:
    one, other = two.sibling(1), two.sibling(2)
    other.announce()
    one.announce()
    await until(lambda: sorted(two.serving) == [1, 2])
    two.coordinator.tell(3, Drain())  # nobody
    started = Started([Phase("weights", 1.5)])
    two.coordinator.tell(1, started)
    two.coordinator.tell(2, EngineGone("why"))
    await until(lambda: two.words[1] and two.words[2])
    assert (two.words[1], two.words[2]) == ([started], [EngineGone("why")])
    two.clients[0]._socket.send(b"\xc1")
    assert await one.get("a") is None, "the coordinator goes on"


async def test_a_ping_is_answered(two: Two) -> None:
    two.sibling(1), two.sibling(2).announce()
    await until(lambda: two.serving)
    two.coordinator.tell(2, Ping())
    await until(lambda: two.alive == [2])
    assert two.words == {1: [], 2: []}


async def test_responses_go_on_in_whichever_process(two: Two) -> None:
    """One is created through one, asked for through the other, gone on from, and deleted."""
    asks = []
    for number in (0, 1):
        client = FakeClient()
        coordinator = two.sibling(1) if number else None
        shared = Shared(
            number=number,
            first_pid=1,
            created=7,
            queue=QueueTable.alone(),
            responses=coordinator or two.store,
            places=coordinator or two.places,
        )
        asks.append(Asker(client, make_state(client, shared=shared)))
    for one, other in (asks, asks[::-1]):
        first = (await respond(one)).json()
        assert first["store"] is True
        path = f"/v1/responses/{first['id']}"
        assert (await other.http.get(path)).json() == first
        second = await respond(other, input="and?", previous_response_id=first["id"])
        assert second.status_code == 200
        prompt = other.engine.requests[-1].prompt_ids
        assert len(prompt) > len(one.engine.requests[-1].prompt_ids) + len(ANSWER)
        assert (await other.http.delete(path)).status_code == 200
        assert (await one.http.get(path)).status_code == 404
        late = await respond(one, previous_response_id=first["id"])
        assert late.json()["error"]["code"] == "previous_response_not_found"
        streamed = await respond(one, stream=True)
        assert '"store":true' in streamed.text.splitlines()[-2]
    for ask in asks:
        await ask.check_alive()
        await ask.http.aclose()


async def test_a_key_s_places_are_one_number_for_all(two: Two) -> None:
    """However requests of three processes come and end: never more than the key has, and as many
    as it has, while more want one.
    """
    most, held, peak = 3, 0, 0
    doors = (two.places, two.sibling(1), two.sibling(2))
    draws = random.Random(5)

    async def request(number: int) -> bool:
        nonlocal held, peak
        async with doors[number % 3].hold(b"key", most) as is_held:
            if is_held:
                held += 1
                peak = max(peak, held)
                try:
                    await asyncio.sleep(draws.random() / 100)
                finally:
                    held -= 1
        return is_held

    for _ in range(10):
        tasks = [asyncio.create_task(request(number)) for number in range(12)]
        await asyncio.sleep(draws.choice([0, 0.002]))
        for task in draws.sample(tasks, 2):
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results.count(True) >= most - 2, "whoever can be let in is"
        await until(lambda: two.places.num_held == 0)
    assert peak == most
    async with doors[1].hold(b"key", 1) as one, doors[2].hold(b"other", 1) as other:
        assert one and other, "keys are counted apart"


async def test_places_are_free_again_however_a_request_ends(two: Two) -> None:
    one, other = two.sibling(1), two.sibling(2)
    asking = asyncio.create_task(one.hold(b"key", 1).__aenter__())
    await asyncio.sleep(0)
    asking.cancel()  # its answer is on its way
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    assert await one.get("a") is None, "the coordinator has heard all that was said before"
    assert two.places.num_held == 0
    await until(lambda: two.places.num_held == 0)
    with contextlib.suppress(ValueError):
        async with one.hold(b"key", 1):
            raise ValueError
    async with one.hold(b"key", 1) as held, other.hold(b"key", 1) as refused:
        assert held and not refused
    await until(lambda: two.places.num_held == 0)


async def test_what_a_dead_sibling_held_is_given_back(two: Two) -> None:
    """And what it asked for last is not heard any more."""
    one, other = two.sibling(1), two.sibling(2)
    async with contextlib.AsyncExitStack() as late:
        assert await late.enter_async_context(one.hold(b"key", 2))
        assert await late.enter_async_context(one.hold(b"key", 2))
        async with other.hold(b"key", 2) as is_held:
            assert not is_held
        two.coordinator.dismiss(1)
        lost = asyncio.create_task(one.hold(b"key", 2).__aenter__())
        async with other.hold(b"key", 2) as first, other.hold(b"key", 2) as second:
            assert first and second and two.places.num_held == 2
    assert not lost.done()
    lost.cancel()
    await until(lambda: two.places.num_held == 0)
    assert await other.get("a") is None, "the coordinator goes on"


async def test_a_first_process_that_hangs_holds_nobody_up(
    two: Two, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What needs it is refused, later at once, until it is heard of again; nothing stays held."""
    monkeypatch.setattr(coordinator_client_module, "ANSWER_S", 0.05)
    one = two.sibling(1)
    two.tasks[0].cancel()
    await asyncio.wait(two.tasks[:1])
    for _ in range(2):
        for asking in (one.get("a"), one.delete("a"), one.hold(b"key", 1).__aenter__()):
            with pytest.raises(APIError) as told:
                await asking
            assert (told.value.status, told.value.code) == (503, "stalled")
            assert int(told.value.headers["Retry-After"]) > 0
        assert not await one.put("a", b"answer", b"items")
        monkeypatch.setattr(coordinator_client_module, "ANSWER_S", 60.0)  # nobody waits any more
    assert len(caplog.records) == 1 and not one._waiting
    two.tasks[0] = asyncio.create_task(two.coordinator.serve())
    two.coordinator.tell(1, Ping())
    await until(lambda: two.alive)
    async with one.hold(b"key", 1) as is_held:
        assert is_held
    assert await one.get("a") is None, "what nobody waits for is not kept"
    await until(lambda: two.places.num_held == 0)
