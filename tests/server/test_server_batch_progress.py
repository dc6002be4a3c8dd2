"""What a batch tells while it runs: lines on a log, a bar on a terminal, and how to go on."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_fakes import COMPLETIONS, FakeClient, make_state

from tokenspeed.config import make_config
from tokenspeed.server import batch as batch_module
from tokenspeed.server.batch import batch
from tokenspeed.server.batch_files import count_lines, read_lines
from tokenspeed.server.batch_progress import BatchCounts, BatchProgress


@given(st.lists(st.sampled_from([b"", b" ", b"\n", b"\r\n", b"{}", b"x" * (1 << 20)]), max_size=9))
def test_lines_are_counted_as_they_are_read(pieces: list[bytes]) -> None:
    file = io.BytesIO(b"before\n" + b"".join(pieces))
    file.readline()
    num_lines = count_lines(file)
    assert num_lines == sum(1 for _ in read_lines(file, 1 << 22))


def test_a_line_says_how_far_it_is() -> None:
    now, tokens = 100.0, 1000
    counts = BatchCounts(skipped=10)
    progress = BatchProgress(counts, 40, lambda: tokens, clock=lambda: now)
    assert progress.line() == "batch: 10 of 40 done (25%); 0.0 tokens/s"
    now, tokens, counts.completed, counts.failed = 110.0, 1500, 8, 2
    said = "batch: 20 of 40 done (50%), 2 failed; 50.0 tokens/s; about 00:20 left"
    assert progress.line() == said
    now, counts.completed = 120.0, 28
    assert progress.line().endswith(" done (100%), 2 failed; 0.0 tokens/s; about 00:00 left")


def test_without_a_known_end_there_is_no_share() -> None:
    now = 0.0
    progress = BatchProgress(BatchCounts(completed=3), None, lambda: 0, clock=lambda: now)
    now = 2.0
    assert progress.line() == "batch: 3 done; 0.0 tokens/s"


async def shown(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on stderr after a run that took a moment."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger("tokenspeed").addHandler(handler := logging.StreamHandler(stream))
    try:
        progress = BatchProgress(counts := BatchCounts(), 1, lambda: 0)
        with progress.shown(0.02):
            counts.completed = 1
            progress.update()
            await asyncio.sleep(0.1)
    finally:
        logging.getLogger("tokenspeed").removeHandler(handler)
    return stream.getvalue()


async def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = await shown(True, monkeypatch)
    assert "requests: 100%" in text and "batch:" not in text


async def test_a_log_shows_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tokenspeed"):
        text = await shown(False, monkeypatch)
    assert "requests:" not in text and "batch: 1 of 1 done (100%)" in text


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """The engine of `batch`."""
    client = FakeClient()
    text = make_state(client).text
    monkeypatch.setattr(batch_module, "EngineClient", lambda _: client)
    monkeypatch.setattr(batch_module, "load_text_side", lambda _: text)
    return client


def written(path: Path, num_lines: int) -> str:
    body = {"prompt": "x", "max_tokens": 90}
    lines = (
        {"custom_id": f"{i}", "method": "POST", "url": COMPLETIONS, "body": body}
        for i in range(num_lines)
    )
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


def test_ctrl_c_says_what_is_kept_and_the_next_run_what_it_skips(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config, out = make_config({"served_model_name": ("m",)}), tmp_path / "out.jsonl"
    source = written(tmp_path / "in.jsonl", 1)
    caplog.set_level(logging.INFO, "tokenspeed")
    assert batch(config, source, str(out)) == 0
    assert "batch: 1 line, up to 128 at once" in caplog.messages
    client.state = "ready"
    client.gate.clear()
    main = threading.main_thread().ident
    assert main is not None
    interrupt = threading.Timer(0.3, signal.pthread_kill, (main, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        batch(config, written(tmp_path / "in.jsonl", 2), str(out))
    interrupt.join()
    said = "batch: 2 lines; the output has 1 answer from before, whose lines are skipped"
    assert said in caplog.messages
    assert caplog.messages[-1] == (
        f"batch: stopped; {out} keeps 1 answer; the same command goes on from there"
    )


def test_an_output_that_keeps_nothing_says_so(
    client: FakeClient, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    client.die_after = 1
    with capfd.disabled(), caplog.at_level(logging.ERROR, "tokenspeed"):
        assert batch(make_config({}), written(tmp_path / "in.jsonl", 3), "/dev/null") == 1
    assert caplog.messages[-1].endswith(
        "; the next run begins anew: /dev/null cannot be read again"
    )
