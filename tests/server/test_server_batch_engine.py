"""Batch files over an engine that is busy, hangs or dies."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from server_fakes import FakeClient, make_state
from test_server_batch import line, read, run, write

from tokenspeed.engine.attached import EngineDead
from tokenspeed.server import batch as batch_module
from tokenspeed.server.batch_progress import BatchCounts


async def test_a_dying_engine_blames_no_line(tmp_path: Path) -> None:
    state = make_state(FakeClient())
    state.client.die_after = 150
    source = write(tmp_path / "in.jsonl", [line(f"{i}") for i in range(20)])
    out = tmp_path / "out.jsonl"
    with pytest.raises(EngineDead):
        await run(state, source, str(out), concurrency=4)
    assert not state.client.running
    assert all(entry["response"]["status_code"] == 200 for entry in read(out))
    done = len(read(out))
    client = FakeClient()
    counts = await run(make_state(client), source, str(out))
    assert counts == BatchCounts(completed=20 - done, skipped=done) and 0 < done < 20


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    client = FakeClient()
    state = make_state(client, max_num_seqs=1, max_queued_requests=1)
    source = write(tmp_path / "in.jsonl", [line(f"{i}") for i in range(4)])
    counts = await run(state, source, str(tmp_path / "out.jsonl"), concurrency=4)
    assert counts == BatchCounts(completed=4)


@pytest.mark.parametrize("phase", ["stalled", "loading"])
async def test_an_engine_that_hangs_fails_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, phase: str
) -> None:
    """What is not sent to it waits, as for a full queue, and is told of once."""
    monkeypatch.setattr(batch_module, "BUSY_WAIT_S", 0.01)
    client = FakeClient()
    state = make_state(client, watchdog_timeout=0.1)
    source = write(tmp_path / "in.jsonl", [line(f"{i}") for i in range(20)])
    if phase == "stalled":  # as with lines that are in its hands
        state.shared.queue.set_busy(True)
        await asyncio.sleep(0.15)
    else:
        client.state = phase
    assert state.phase == phase
    running = asyncio.create_task(run(state, source, str(tmp_path / "out.jsonl"), concurrency=2))
    await asyncio.sleep(0.1)
    client.state, client.stats_at = "ready", time.monotonic() + 60
    assert await running == BatchCounts(completed=20)
    assert sum("batch: waiting" in record.message for record in caplog.records) == 1
