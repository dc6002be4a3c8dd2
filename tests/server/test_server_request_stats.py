"""--enable-log-request-stats: one record a sample that ends, however it ends."""

from __future__ import annotations

import ast
import asyncio
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from server_fakes import Asker, FakeClient, make_state

from tokenspeed.timeline import Timing

FIELDS = """status reason prompt_tokens cache_tokens output_tokens cache_hit_rate queue_ms
    prefill_ms ttft_ms total_ms preempt_ms preempt_count decode_tps acc_len acc_rate recv_ts
    commit_ts finish_ts""".split()


def make_ask(**options: Any) -> Asker:
    client = FakeClient()
    return Asker(client, make_state(client, **options))


def records(caplog: pytest.LogCaptureFixture) -> list[tuple[str, dict[str, Any]]]:
    """Request ids and records, read from the log as Python would read them."""
    found = []
    for record in caplog.records:
        line = record.getMessage()
        match = re.fullmatch(r"Req: (\S+) Finish! RequestStats\((.*)\)", line)
        if match:
            call = ast.parse(f"f({match[2]})", mode="eval").body
            assert isinstance(call, ast.Call) and not call.args
            values = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            assert list(values) == FIELDS
            found.append((match[1], values))
    return found


def test_the_documentation_explains_each_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "observability.md").read_text()
    table = text[text.index("| Field |") : text.index("What did not happen is 0")]
    rows = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    assert [name for row in rows for name in re.findall(r"`(\w+)`", row)] == FIELDS
    (line,) = re.findall(r"Finish! RequestStats\((.*)\)", text)
    call = ast.parse(f"f({line})", mode="eval").body
    assert isinstance(call, ast.Call) and [each.arg for each in call.keywords] == FIELDS


async def test_a_record_of_each_sample(caplog: pytest.LogCaptureFixture) -> None:
    ask = make_ask(enable_log_request_stats=True)
    ask.engine.timing = Timing(queue_s=0.0125, prefill_s=0.5, delay_s=0.25, num_delays=3)
    ask.engine.pause_s = 0.002
    before = time.time()
    with caplog.at_level(logging.INFO, "tokenspeed"):
        answer = await ask.completion(prompt="four", n=2, max_tokens=5)
    found = records(caplog)
    assert sorted(name for name, _ in found) == [f"{answer.json()['id']}-{i}" for i in (0, 1)]
    for _, record in found:
        assert (record["status"], record["reason"]) == ("finished", "length")
        assert (record["prompt_tokens"], record["cache_tokens"], record["output_tokens"]) == (
            4,
            1,
            5,
        )
        assert (record["cache_hit_rate"], record["acc_len"], record["acc_rate"]) == (
            0.25,
            None,
            None,
        )
        assert (record["queue_ms"], record["prefill_ms"]) == (12.5, 500.0)
        assert (record["preempt_ms"], record["preempt_count"]) == (250.0, 3)
        assert 0 < record["ttft_ms"] < record["total_ms"]
        decode_s = (record["total_ms"] - record["ttft_ms"]) / 1e3
        assert record["decode_tps"] == pytest.approx(4 / decode_s, rel=0.02)
        assert before - 0.001 <= record["recv_ts"] <= record["finish_ts"] <= time.time() + 0.001
        assert record["commit_ts"] == pytest.approx(record["recv_ts"] + 0.0125, abs=0.002)
        lasted = record["finish_ts"] - record["recv_ts"]
        assert lasted == pytest.approx(record["total_ms"] / 1e3, abs=0.002)


async def test_stop_strings_are_stops(caplog: pytest.LogCaptureFixture) -> None:
    """The text side ends these, so the engine only sees an abort."""
    ask = make_ask(enable_log_request_stats=True)
    with caplog.at_level(logging.INFO, "tokenspeed"):
        await ask.completion(stop=["wörld"], max_tokens=100)
    ((_, record),) = records(caplog)
    assert (record["status"], record["reason"]) == ("finished", "stop")


async def test_what_did_not_happen_is_zero(caplog: pytest.LogCaptureFixture) -> None:
    ask = make_ask(enable_log_request_stats=True)
    ask.engine.gate.clear()
    ask.engine.die_after = 0
    ask.engine.gate.set()
    with caplog.at_level(logging.INFO, "tokenspeed"):
        await ask.completion()
    ((_, record),) = records(caplog)
    assert (record["status"], record["reason"], record["output_tokens"]) == ("aborted", "error", 0)
    for name in ("queue_ms", "prefill_ms", "ttft_ms", "preempt_ms", "decode_tps", "commit_ts"):
        assert record[name] == 0.0, name
    assert record["total_ms"] > 0


async def test_a_client_that_leaves_is_an_abort(caplog: pytest.LogCaptureFixture) -> None:
    ask = make_ask(enable_log_request_stats=True)
    ask.engine.gate.clear()
    with caplog.at_level(logging.INFO, "tokenspeed"):
        task = asyncio.create_task(ask.completion(prompt="four"))
        async with asyncio.timeout(5):
            while not ask.engine.running:
                await asyncio.sleep(0.005)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    ((_, record),) = records(caplog)
    assert (record["status"], record["reason"]) == ("aborted", "abort")
    assert (record["prompt_tokens"], record["output_tokens"], record["queue_ms"]) == (4, 0, 0.0)


async def test_nothing_is_logged_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    ask = make_ask()
    with caplog.at_level(logging.INFO, "tokenspeed"):
        await ask.completion()
    assert not records(caplog)
