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
from tokenspeed.engine.messages import Stats
from tokenspeed.server import batch as batch_module
from tokenspeed.server import batch_progress
from tokenspeed.server.batch import batch
from tokenspeed.server.batch_files import count_lines, read_lines
from tokenspeed.server.batch_progress import BatchCounts, BatchProgress


@given(st.lists(st.sampled_from([b"", b" ", b"\n", b"\r\n", b"{}", b"x" * (1 << 20)]), max_size=9))
def test_lines_are_counted_as_they_are_read(pieces: list[bytes]) -> None:
    file = io.BytesIO(b"before\n" + b"".join(pieces))
    file.readline()
    num_lines = count_lines(file)
    assert num_lines == sum(1 for _ in read_lines(file, 1 << 22))


class Scripted:
    """A clock and an engine that stand at what a test says."""

    def __init__(self, tokens: int = 0) -> None:
        self.now, self.tokens, self.running = 100.0, tokens, 0

    def progress(self, counts: BatchCounts, total: int | None) -> BatchProgress:
        def stats() -> Stats:
            return Stats(generation_tokens=self.tokens, num_running=self.running)

        return BatchProgress(counts, total, stats, clock=lambda: self.now)


def test_a_line_says_how_far_it_is() -> None:
    engine, counts = Scripted(1000), BatchCounts(skipped=10)
    progress = engine.progress(counts, 40)
    said = "batch: 10 of 40 done (25%), 0 running; 0 tokens, 0.0 tokens/s"
    assert progress.line() == said
    engine.now, engine.tokens, engine.running = 110.0, 1500, 4
    counts.completed, counts.failed = 8, 2
    said = "batch: 20 of 40 done (50%), 2 failed, 4 running; 500 tokens, 50.0 tokens/s"
    assert progress.line() == f"{said}; about 00:20 left"
    engine.now, counts.completed, engine.running = 120.0, 28, 0
    end = " done (100%), 2 failed, 0 running; 500 tokens, 0.0 tokens/s; about 00:00 left"
    assert progress.line().endswith(end)


def test_a_long_first_answer_is_seen_to_grow() -> None:
    """Before any line is done: on a log, and beside the bar."""
    engine = Scripted()
    progress = engine.progress(BatchCounts(), 1)
    engine.now, engine.tokens, engine.running = 102.0, 90, 1
    assert progress.postfix() == "90 tokens, 45.0 tokens/s"
    said = "batch: 0 of 1 done (0%), 1 running; 90 tokens, 45.0 tokens/s"
    assert progress.line() == said
    engine.now, engine.tokens = 103.0, 100
    assert progress.postfix() == "100 tokens, 33.3 tokens/s"
    assert progress.line().endswith("; 100 tokens, 10.0 tokens/s")


def test_without_a_known_end_there_is_no_share() -> None:
    engine = Scripted()
    progress = engine.progress(BatchCounts(completed=3), None)
    engine.now = 102.0
    assert progress.line() == "batch: 3 done, 0 running; 0 tokens, 0.0 tokens/s"


async def shown(is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """What is on stderr after a run that took a moment."""
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    logging.getLogger("tokenspeed").addHandler(handler := logging.StreamHandler(stream))
    try:
        engine = Scripted()
        progress = engine.progress(counts := BatchCounts(), 1)
        with progress.shown(0.02):
            engine.now, engine.tokens = 101.0, 30
            await asyncio.sleep(0.1)
            counts.completed = 1
            progress.update()
            await asyncio.sleep(0.1)
    finally:
        logging.getLogger("tokenspeed").removeHandler(handler)
    return stream.getvalue()


async def test_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_progress, "_REFRESH_S", 0.02)
    text = await shown(True, monkeypatch)
    assert "requests: 100%" in text and "batch:" not in text
    early, _, _ = text.partition("100%")
    assert "| 0/1 [" in early and "30 tokens, 30.0 tokens/s" in early


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
    assert "batch: 1 line, up to 1 at once" in caplog.messages
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


@pytest.mark.parametrize(
    ("options", "concurrency", "said"),
    [
        ({"max_num_seqs": 4}, None, "batch: 9 lines, up to 4 at once"),
        ({"max_num_seqs": 4}, 2, "batch: 9 lines, up to 2 at once"),
        ({"max_num_seqs": 4}, 30, "batch: 9 lines, up to 4 at once"),
        ({"max_num_seqs": 64}, None, "batch: 9 lines, up to 9 at once"),
    ],
)
def test_how_many_run_at_once_is_true(
    client: FakeClient,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    concurrency: int | None,
    said: str,
) -> None:
    """Lines beyond --max-num-seqs are sent, so that the engine has them at hand, and wait there."""
    source = written(tmp_path / "in.jsonl", 9)
    with caplog.at_level(logging.INFO, "tokenspeed"):
        config = make_config({"served_model_name": ("m",), **options})
        assert batch(config, source, str(tmp_path / "out.jsonl"), concurrency=concurrency) == 0
    assert said in caplog.messages
