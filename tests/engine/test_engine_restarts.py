"""An engine that dies is started again, as often as may be."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

import pytest
from engine_reader import generate, process_id
from engine_tiny import Outcome, request, tiny_config
from hypothesis import given
from hypothesis import strategies as st
from test_process_life import closed_without_trace, is_alive

from tokenspeed.config import Config
from tokenspeed.engine import client as client_module
from tokenspeed.engine.attached import AttachedClient, EngineAway, EngineDead, EngineRefused
from tokenspeed.engine.client import EngineClient
from tokenspeed.engine.messages import Ready, Stats
from tokenspeed.engine.restarts import Restarts

HOUR_S = 3600.0


@given(
    limit=st.integers(0, 4),
    gaps=st.lists(st.integers(0, 12), max_size=40),
)
def test_no_window_has_more_than_the_limit(limit: int, gaps: list[int]) -> None:
    """And what is refused would have been one too many."""
    now, allowed = 0, []
    restarts = Restarts(limit, 10.0, clock=lambda: now)
    for gap in gaps:
        now += gap
        recent = [time for time in allowed if now - time < 10]
        is_allowed = restarts.allow()
        assert is_allowed == (len(recent) < limit)
        if is_allowed:
            allowed.append(now)
        assert restarts.count == len(recent) + is_allowed


def engines() -> set[int]:
    """Children of this process."""
    found = set()
    for listing in Path("/proc/self/task").glob("*/children"):
        for child in map(int, listing.read_text().split()):
            with contextlib.suppress(OSError):
                if b"engine.process" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.add(child)
    return found


async def outcome_of(client: AttachedClient, name: str) -> list[int]:
    outcome = Outcome()
    async for delta in generate(client, request(name, [5, 6, 7], max_tokens=12, ignore_eos=True)):
        outcome.push(delta)
    assert outcome.error is None
    return outcome.token_ids


async def killed_with(client: EngineClient, *of: AttachedClient) -> list[EngineDead]:
    """What requests of these clients get when the engine is killed, which holds them meanwhile."""
    await client.commands.ask("pause")
    doomed = [asyncio.create_task(outcome_of(each, "doomed")) for each in of]
    while any("doomed" not in each._sinks for each in of):
        await asyncio.sleep(0)
    os.kill(process_id(client), signal.SIGKILL)
    ends = await asyncio.gather(*doomed, return_exceptions=True)
    assert all(type(end) is EngineDead for end in ends)
    return [end for end in ends if isinstance(end, EngineDead)]


async def test_clients_lose_what_ran_and_follow(tiny_model: str) -> None:
    """The one that owns the engine, and one that is attached; until the limit is reached."""
    client = EngineClient(tiny_config(tiny_model), Restarts(1, HOUR_S))
    other = AttachedClient()
    reasons: list[str] = []

    def on_loss(reason: str) -> None:
        reasons.append(reason)
        other.note_loss(reason)
        other.follow(client.address)

    client.on_loss = on_loss
    await client.start()
    other.attach(client.address)
    both = (client, other)
    expected = [await outcome_of(each, "before") for each in both]
    phases = client.phases.phases
    first = process_id(client)
    ends = await killed_with(client, *both)
    assert all("SIGKILL" in str(end) for end in ends)
    assert other.stats == Stats(), "neither steps nor a pause are the next engine's"
    for each in both:
        assert each.state == "loading"
        with pytest.raises(EngineAway):
            each.submit(request("early", [5]), None)  # type: ignore[arg-type]
    with pytest.raises(EngineAway):
        await client.commands.ask("tell")
    assert [await outcome_of(each, "after") for each in both] == expected
    assert not is_alive(first) and is_alive(process_id(client))
    assert client.phases.phases == phases, "of the first start"
    assert len(reasons) == 1 and "SIGKILL" in reasons[0]
    (last,) = await killed_with(client, client)
    assert re.search(r"SIGKILL.*again 1 times \(--engine-restarts\)", str(last))
    assert client.state == "dead" and len(reasons) == 1
    await other.close()
    await closed_without_trace(client)


async def lost(config: Config) -> EngineClient:
    """A client whose engine has died, after it had served (so it seems: it had loaded nothing)."""
    client = EngineClient(config, Restarts(5, HOUR_S))
    is_lost = asyncio.Event()
    client.on_loss = lambda reason: is_lost.set()
    await client.start()
    client.ready = Ready(
        max_model_len=1,
        vocab_size=1,
        num_pages=1,
        block_size=1,
        kv_cache_dtype="",
        seconds=0.0,
        settings=config,
        reasons={},
    )
    os.kill(process_id(client), signal.SIGKILL)
    await is_lost.wait()
    return client


async def test_a_next_engine_that_refuses_is_the_end() -> None:
    client = await lost(tiny_config("/nowhere/at/all"))
    with pytest.raises(EngineRefused, match="no such folder"):
        await client.wait_ready()
    await closed_without_trace(client)


async def test_one_that_cannot_be_started_is_the_end(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await lost(tiny_config(tiny_model))
    monkeypatch.setattr(client_module.sys, "executable", "/nowhere/python")
    with pytest.raises(EngineDead, match=r"could not be started again.*/nowhere/python"):
        await client.wait_ready()
    await closed_without_trace(client)


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.3])
async def test_a_close_meanwhile_leaves_no_engine(tiny_model: str, seconds: float) -> None:
    before = engines()
    client = await lost(tiny_config(tiny_model))
    await asyncio.sleep(seconds)
    await closed_without_trace(client)
    assert client.failure == "the engine was closed" and engines() <= before


async def test_a_first_start_is_not_tried_again() -> None:
    client = EngineClient(tiny_config("/nowhere/at/all"), Restarts(5, HOUR_S))
    await client.start()
    os.kill(process_id(client), signal.SIGKILL)
    with pytest.raises(EngineDead, match="SIGKILL"):
        await client.wait_ready()
    await closed_without_trace(client)
