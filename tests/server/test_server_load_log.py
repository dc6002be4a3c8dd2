"""The log's line about the load: what it says, and when it says nothing."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from running_server import running
from server_fakes import CHAT, FakeClient

from tokenspeed.engine.messages import Stats
from tokenspeed.server import run as run_module
from tokenspeed.server.load_log import LoadLog, log_load


def test_a_line_shows_what_happened_since_the_last() -> None:
    before = Stats(prompt_tokens=100, prefix_queries=100, prefix_hits=90, steps=10)
    log = LoadLog(msgspec.structs.replace(before, host_launch_s=0.5, host_commit_s=0.25), 50.0)
    busy = Stats(
        num_running=3,
        num_waiting=2,
        kv_usage=0.256,
        prompt_tokens=350,
        generation_tokens=42,
        prefix_queries=300,
        prefix_hits=140,
        steps=50,
        host_launch_s=0.6,
        host_commit_s=0.31,
    )
    assert log.line(busy, 60.0) == (
        "Avg prompt throughput: 25.0 tokens/s, Avg generation throughput: 4.2 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, KV cache usage: 25.6%, Prefix cache hit rate: 25.0%, "
        "Host time: 4.00 ms a step"
    )
    stuck = log.line(busy, 65.0)
    assert stuck is not None and stuck.startswith("Avg prompt throughput: 0.0 tokens/s")
    assert "Prefix cache hit rate: 25.0%, Host time: 0.00 ms" in stuck, (
        "no prompt came that could change it"
    )


def test_an_engine_that_was_started_again_counts_from_zero() -> None:
    log = LoadLog(Stats(steps=900, prompt_tokens=1000, generation_tokens=1000), 0.0)
    line = log.line(Stats(steps=3, prompt_tokens=20, generation_tokens=5), 10.0)
    assert line is not None
    assert "prompt throughput: 2.0 tokens/s, Avg generation throughput: 0.5 tokens/s" in line


@pytest.mark.parametrize(
    ("stats", "is_told"),
    [
        (Stats(), False),
        (Stats(steps=5, preemptions=2), False),
        (Stats(num_running=1), True),
        (Stats(num_waiting=1), True),
        (Stats(prompt_tokens=1), True),
        (Stats(generation_tokens=1), True),
    ],
)
def test_idle_times_are_not_told(stats: Stats, is_told: bool) -> None:
    assert (LoadLog(Stats(), 0.0).line(stats, 10.0) is not None) is is_told


async def test_one_more_line_after_the_last_token(caplog: pytest.LogCaptureFixture) -> None:
    client, asked = FakeClient(), []
    scenes = [
        Stats(),
        Stats(num_running=1, generation_tokens=10),
        Stats(generation_tokens=30),
        Stats(generation_tokens=30),
    ]

    async def sleep(seconds: float) -> None:
        asked.append(seconds)
        if len(asked) > len(scenes):
            raise asyncio.CancelledError
        client.stats = scenes[len(asked) - 1]

    def clock() -> float:
        return 10.0 * len(asked)

    with caplog.at_level(logging.INFO, "tokenspeed"), pytest.raises(asyncio.CancelledError):
        await log_load(client, 10.0, sleep=sleep, clock=clock)  # type: ignore[arg-type]
    assert set(asked) == {10.0}
    lines = [record.getMessage() for record in caplog.records]
    assert ["1.0" in lines[0], "2.0" in lines[1], len(lines)] == [True, True, 2]
    assert ["Running: 1" in lines[0], "Running: 0" in lines[1]] == [True, True]


@pytest.mark.parametrize(("seconds", "expected"), [(7, [7.0]), (0, [])])
async def test_load_is_logged_while_it_serves(
    seconds: int, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, began, ended = FakeClient(), [], []
    body = {"messages": [{"role": "user", "content": "x"}]}

    async def log_load(watched: FakeClient, interval_s: float) -> None:
        assert watched is client
        began.append(interval_s)
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(interval_s)

    monkeypatch.setattr(run_module, "log_load", log_load)
    async with running(client, log_stats_interval=seconds) as server:
        await server.until("ready")
        assert (await server.http.post(CHAT, json=body)).status_code == 200
        assert (began, ended) == (expected, [])
    assert ended == expected
