"""What several HTTP processes of a server have in common: the queue, its limits, the watchdog, the
metrics. Here they are two applications in one process, over one file each.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import values
from prometheus_client.multiprocess import MultiProcessCollector
from server_fakes import Asker, FakeClient, make_state, refused
from test_server_metrics import TYPES, samples, types

from tokenspeed.engine.messages import Stats
from tokenspeed.server.key_places import KeyCounts
from tokenspeed.server.metrics import CACHE_S
from tokenspeed.server.queue_table import QueueTable
from tokenspeed.server.response_store import ResponseStore
from tokenspeed.server.sharing import Shared

ROWS = 3


@given(
    st.lists(
        st.tuples(
            st.integers(0, ROWS - 1),
            st.integers(1, 1 << 20),
            st.integers(0, 1 << 40),
            st.booleans(),
        )
    ),
    st.integers(0, ROWS - 1),
)
def test_rows_are_each_one_s_own_and_sums_are_of_all(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, int, bool]], lost: int
) -> None:
    path = tmp_path_factory.mktemp("queue") / "table"
    tables = [QueueTable.create(path, ROWS), *(QueueTable.open(path, row) for row in (1, 2))]
    expected, busy = [[0, 0] for _ in range(ROWS)], [False] * ROWS
    for row, num_samples, num_tokens, is_busy in steps:
        tables[row].occupy(num_samples, num_tokens)
        expected[row][0] += num_samples
        expected[row][1] += num_tokens
        tables[row].set_busy(is_busy)
        busy[row] = is_busy
    tables[0].clear(lost)
    expected[lost], busy[lost] = [0, 0], False
    for table, own in zip(tables, expected, strict=True):
        assert table.own == tuple(own)
        assert table.num_samples == sum(each[0] for each in expected)
        assert table.num_tokens == sum(each[1] for each in expected)
        assert (table.busy_since is not None) == any(busy)
    for table, own in zip(tables, expected, strict=True):
        table.occupy(-own[0], -own[1])
    assert tables[0].num_samples == tables[0].num_tokens == 0


def test_the_longest_busy_counts(tmp_path: Path) -> None:
    first = QueueTable.create(tmp_path / "table", 2)
    second = QueueTable.open(tmp_path / "table", 1)
    first.set_busy(True)
    since = first.busy_since
    second.set_busy(True)
    assert first.busy_since == second.busy_since == since
    first.set_busy(False)
    later = first.busy_since
    assert since is not None and later is not None and later >= since


@pytest.fixture
def options() -> dict[str, Any]:
    return {}


@pytest_asyncio.fixture
async def pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> AsyncIterator[list[Asker]]:
    """The applications of two processes, each of which counts in files of its own."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())
    store, places = ResponseStore(1 << 20, 10.0), KeyCounts()
    tables = [QueueTable.create(tmp_path / "queue", 2), QueueTable.open(tmp_path / "queue", 1)]
    asks = []
    for number, table in enumerate(tables):
        client = FakeClient()
        shared = Shared(
            number=number,
            first_pid=1,
            created=7,
            queue=table,
            responses=store,
            places=places,
            metrics_folder=tmp_path,
        )
        asks.append(Asker(client, make_state(client, shared=shared, **options)))
    yield asks
    for ask in asks:
        await ask.check_alive()
        await ask.http.aclose()


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"max_num_seqs": 2, "max_queued_requests": 2}, "4 sequences"),
        ({"max_queued_tokens": 6}, "--max-queued-tokens"),
    ],
)
async def test_the_queue_s_limits_hold_for_both_together(pair: list[Asker], flag: str) -> None:
    one, two = pair
    one.engine.gate.clear()
    waiting = asyncio.create_task(one.completion(n=2, max_tokens=100))
    while not one.engine.running:
        await asyncio.sleep(0.01)
    assert (await two.completion(n=1)).status_code == 200
    answer = await two.completion(n=3)
    assert flag in refused(answer, 429)["message"]
    one.engine.gate.set()
    assert (await waiting).status_code == 200
    assert (await two.completion(n=3)).status_code == 200


@pytest.mark.parametrize("options", [{"watchdog_timeout": 0.1}])
async def test_an_engine_that_hangs_is_ready_nowhere(pair: list[Asker]) -> None:
    one, two = pair
    one.engine.gate.clear()
    hanging = asyncio.create_task(one.completion())
    await asyncio.sleep(0.3)
    for ask in pair:
        assert (await ask.http.get("/ready")).json()["status"] == "stalled"
        assert refused(await ask.completion(), 503)["code"] == "stalled"
    one.engine.gate.set()
    assert (await hanging).status_code == 200
    assert (await two.http.get("/ready")).status_code == 200


async def test_draws_and_ids_differ(pair: list[Asker]) -> None:
    answers = [await ask.completion() for ask in pair for _ in range(3)]
    assert len({answer.json()["id"] for answer in answers}) == 6
    assert len({request.seed for ask in pair for request in ask.engine.requests}) == 6
    cards = [(await ask.http.get("/v1/models")).json()["data"][0] for ask in pair]
    assert cards[0] == cards[1] and cards[0]["created"] == 7


async def test_either_shows_the_sum_of_both(pair: list[Asker]) -> None:
    """And what there is once is counted once: the engine's steps."""
    one, two = pair
    for ask in pair:
        ask.engine.stats = Stats(num_running=3, prompt_tokens=7)
        if ask.engine.on_stats is not None:
            ask.engine.on_stats(Stats(), Stats(steps=2, scheduled_tokens=8))
    await one.completion(max_tokens=4)
    for _ in range(2):
        await two.completion(max_tokens=4)
    await one.http.get("/nothing")
    texts = [(await ask.http.get("/metrics")).text for ask in pair]
    one_, two_ = (samples(text, "tokenspeed:") for text in texts)
    label = (("model_name", "m"),)
    for found in (one_, two_):
        assert found["time_to_first_token_seconds_count", label] == 3
        assert found["time_to_first_token_seconds_bucket", (("le", "+Inf"), *label)] == 3
        assert found["request_success_total", (("finished_reason", "length"), *label)] == 3
        assert found["iteration_tokens_total_count", label] == 2
        assert found["iteration_tokens_total_sum", label] == 8
        assert found["num_requests_running", label] == 3
        assert found["prompt_tokens_total", label] == 7
        http = (("method", "POST"), ("path", "/v1/completions"), ("status", "200"))
        assert found["http_requests_total", http] == 3
    assert [types(text) for text in texts] == [TYPES, TYPES]


async def test_who_takes_a_place_counts_on_in_its_files(pair: list[Asker], tmp_path: Path) -> None:
    await pair[1].completion(max_tokens=4)
    files = sorted(tmp_path.glob("*.db"))
    state = pair[1].state
    shared = dataclasses.replace(state.shared, number=7)
    client = FakeClient()
    third = Asker(client, make_state(client, shared=shared))
    await third.completion(max_tokens=4)
    found = samples((await third.http.get("/metrics")).text, "tokenspeed:")
    assert found["time_to_first_token_seconds_count", (("model_name", "m"),)] == 2
    assert sorted(tmp_path.glob("*.db")) == files
    await third.http.aclose()


async def test_sums_are_made_in_a_thread_and_once_for_many(
    pair: list[Asker], monkeypatch: pytest.MonkeyPatch
) -> None:
    collect, threads = MultiProcessCollector.collect, []

    def slow(self: Any) -> Any:
        threads.append(threading.current_thread())
        time.sleep(0.05)
        return collect(self)

    monkeypatch.setattr(MultiProcessCollector, "collect", slow)
    scrapes = [pair[0].http.get("/metrics") for _ in range(20)]
    texts = {answer.text for answer in await asyncio.gather(*scrapes)}
    assert len(texts) == len(threads) == 1 and threading.main_thread() not in threads
    await pair[0].completion(max_tokens=4)
    await asyncio.sleep(CACHE_S)
    assert (await pair[0].http.get("/metrics")).text not in texts


@pytest.mark.parametrize("options", [{"metrics_compat": "vllm"}])
async def test_vllm_names_show_the_sum_too(pair: list[Asker]) -> None:
    for ask in pair:
        await ask.completion(max_tokens=4)
    found = samples((await pair[0].http.get("/metrics")).text, "vllm:")
    assert found["time_to_first_token_seconds_count", (("model_name", "m"),)] == 2
