"""Batch files: good and bad lines, resuming, torn and foreign outputs."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from server_fakes import ANSWER, CHAT, COMPLETIONS, FakeClient, make_state

from tokenspeed.config import make_config
from tokenspeed.options import ConfigError
from tokenspeed.server import batch as batch_module
from tokenspeed.server.batch import batch, run_batch
from tokenspeed.server.batch_files import BatchFileError, BatchOutput, open_input
from tokenspeed.server.batch_progress import BatchCounts


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "x"}]
    asked = {"messages": messages} if url == CHAT else {"prompt": "x"}
    body = asked | {"max_tokens": 90} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


GOOD = [line("a"), line("b", CHAT), line("c", n=2)]
BAD: list[tuple[Any, str | None, int | str]] = [
    (line("bad-value", temperature=9), "bad-value", 400),
    (line("bad-model", model="gpt-9"), "bad-model", 404),
    (line("streamed", stream=True), "streamed", 400),
    (line("too-long", prompt="x" * 999), "too-long", 400),
    (line("bad-url", "/v1/embeddings"), "bad-url", "invalid_url"),
    (line("a"), None, "duplicate_custom_id"),
    (line("bad-body") | {"body": "text"}, "bad-body", "invalid_line"),
    (line("bad-body"), None, "duplicate_custom_id"),
    (line("get") | {"method": "GET"}, "get", "invalid_url"),
    (line(7), None, "invalid_line"),
    (line(""), None, "invalid_line"),
    (line("x" * 513), None, "invalid_line"),
    ({"custom_id": "no-url"}, "no-url", "invalid_line"),
    ("{broken", None, "invalid_line"),
    ("[" * 3000, None, "invalid_line"),
    ('"text"', None, "invalid_line"),
    ('{"custom_id": "long", "x": "' + "y" * 5000 + '"}', None, "line_too_long"),
]


@pytest.fixture
def state() -> Any:
    client = FakeClient()
    return make_state(client, max_request_bytes=4096)


def write(path: Path, lines: list[Any]) -> str:
    texts = [entry if isinstance(entry, str) else json.dumps(entry) for entry in lines]
    path.write_text("\n".join(texts) + "\n")
    return str(path)


def read(path: Path) -> list[Any]:
    return [json.loads(text) for text in path.read_text().splitlines()]


async def run(state: Any, source: str, out: str, concurrency: int | None = None) -> BatchCounts:
    with open_input(source) as file, BatchOutput(out) as output:
        return await run_batch(state, file, output, concurrency=concurrency)


async def test_good_and_bad_lines(state: Any, tmp_path: Path) -> None:
    lines = [*GOOD, "", *(bad for bad, _, _ in BAD), line("last")]
    out = tmp_path / "out.jsonl"
    counts = await run(state, write(tmp_path / "in.jsonl", lines), str(out), concurrency=3)
    assert counts == BatchCounts(completed=4, failed=len(BAD), skipped=0)
    answers = read(out)
    assert len(answers) == len(BAD) + 4
    good = {entry["custom_id"]: entry for entry in answers if entry["error"] is None}
    assert good["a"]["response"]["body"]["choices"][0]["text"] == ANSWER
    chat = good["b"]["response"]
    assert chat["status_code"] == 200 and chat["body"]["object"] == "chat.completion"
    assert chat["body"]["choices"][0]["message"]["content"] == ANSWER
    assert len(good["c"]["response"]["body"]["choices"]) == 2
    outcomes = Counter(
        (entry["custom_id"], entry["error"]["code"])
        if entry["error"]
        else (entry["custom_id"], entry["response"]["status_code"])
        for entry in answers
    )
    assert outcomes == Counter(
        [*((id, outcome) for _, id, outcome in BAD), *((id, 200) for id in ("a", "b", "c", "last"))]
    )
    assert good["bad-value"]["response"]["body"]["error"]["param"] == "temperature"
    assert len({entry["id"] for entry in answers}) == len(answers)
    assert all(entry["response"] is None for entry in answers if entry["error"])
    assert all(len(entry["error"]["message"]) <= 700 for entry in answers if entry["error"])
    assert not state.client.running and state.shared.queue.own == (0, 0)


async def test_a_second_run_does_nothing(state: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*GOOD, *(bad for bad, _, _ in BAD)])
    out = tmp_path / "out.jsonl"
    await run(state, source, str(out))
    before = out.read_bytes()
    asked = len(state.client.requests)
    counts = await run(state, source, str(out))
    assert counts == BatchCounts(skipped=len(GOOD) + len(BAD), failed_before=len(BAD))
    assert out.read_bytes() == before and len(state.client.requests) == asked


@pytest.mark.parametrize("cut", [1, 20, 150])
async def test_a_torn_last_line_is_done_again(state: Any, tmp_path: Path, cut: int) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    out = tmp_path / "out.jsonl"
    await run(state, source, str(out), concurrency=1)
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    counts = await run(state, source, str(out))
    assert counts == BatchCounts(completed=1, skipped=2)
    assert sorted(entry["custom_id"] for entry in read(out)) == ["a", "b", "c"]


async def test_a_duplicate_never_stands_for_the_first_line(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [line("a0"), line("a0")])
    out = tmp_path / "out.jsonl"
    client = FakeClient()
    client.gate.clear()
    task = asyncio.create_task(run(make_state(client), source, str(out), concurrency=2))
    while not out.exists() or not out.read_bytes():
        assert not task.done()
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    counts = await run(make_state(FakeClient()), source, str(out))
    assert counts == BatchCounts(completed=1, skipped=1, failed_before=1)
    assert [entry["response"]["status_code"] for entry in read(out) if entry["custom_id"]] == [200]


async def test_unusable_files(state: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    with pytest.raises(BatchFileError, match="cannot read"):
        await run(state, str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl"))
    with pytest.raises(BatchFileError, match="cannot write"):
        await run(state, source, str(tmp_path))
    foreign = tmp_path / "notes.txt"
    foreign.write_text("my notes\n")
    with pytest.raises(BatchFileError, match="something else"):
        await run(state, source, str(foreign))
    assert foreign.read_text() == "my notes\n"
    with pytest.raises(BatchFileError, match="something else"):
        await run(state, source, source)
    with BatchOutput(str(tmp_path / "held.jsonl")):
        with pytest.raises(BatchFileError, match="another run"):
            await run(state, source, str(tmp_path / "held.jsonl"))


async def test_a_full_disk_leaves_whole_lines(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = os.write, Counter[str]()

    def full(fd: int, data: Any) -> int:
        calls["write"] += 1
        if calls["write"] == 3:
            raise OSError(28, "No space left on device")
        return real(fd, bytes(data)[:100] if calls["write"] == 2 else data)

    source = write(tmp_path / "in.jsonl", GOOD)
    out = tmp_path / "out.jsonl"
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(BatchFileError, match="No space"):
        await run(state, source, str(out), concurrency=1)
    monkeypatch.undo()
    assert [entry["custom_id"] for entry in read(out)] == ["a"]


async def test_stdin_and_stdout(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    with open(source) as file:
        monkeypatch.setattr("sys.stdin", file)
        counts = await run(state, "-", "-")
    assert counts.completed == 3
    written = capfdbinary.readouterr().out.splitlines()
    assert sorted(json.loads(text)["custom_id"] for text in written) == ["a", "b", "c"]


@pytest.mark.parametrize("path", ["/dev/full", "/dev/null", "fifo"])
async def test_outputs_that_are_no_files(state: Any, tmp_path: Path, path: str) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    if path == "/dev/full":
        with pytest.raises(BatchFileError, match="cannot write /dev/full: No space"):
            await run(state, source, path)
        assert not state.client.running
    elif path == "/dev/null":
        assert await run(state, source, path) == BatchCounts(completed=3)
    else:
        path = str(tmp_path / path)
        os.mkfifo(path)
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            assert await run(state, source, path) == BatchCounts(completed=3)
            written = os.read(reader, 1 << 16).splitlines()
        finally:
            os.close(reader)
        assert sorted(json.loads(text)["custom_id"] for text in written) == ["a", "b", "c"]
        assert stat.S_ISFIFO(os.stat(path).st_mode)


async def test_a_pipe_without_a_reader_ends_the_run(state: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open_input(source) as file, BatchOutput(path) as output:
        os.close(reader)
        with pytest.raises(BatchFileError, match=f"cannot write {path}: Broken pipe"):
            await run_batch(state, file, output)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch, state: Any) -> list[Any]:
    """What `batch` starts instead of an engine: one list entry for each start."""
    started: list[Any] = []

    def make(config: Any) -> FakeClient:
        started.append(config)
        return FakeClient()

    monkeypatch.setattr(batch_module, "EngineClient", make)
    monkeypatch.setattr(batch_module, "load_text_side", lambda _: state.text)
    return started


@pytest.mark.parametrize("which", ["input", "output"])
def test_files_are_opened_before_the_engine_starts(
    engine: list[Any], tmp_path: Path, which: str
) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    missing = str(tmp_path / "none" / "x.jsonl")
    out = str(tmp_path / "out.jsonl")
    paths = (missing, out) if which == "input" else (source, missing)
    with pytest.raises(ConfigError) as caught:
        batch(make_config({}), *paths)
    assert not engine and not os.path.exists(out)
    verb = "read" if which == "input" else "write"
    assert str(caught.value) == f"cannot {verb} {missing}: No such file or directory"


def test_exit_codes(engine: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = make_config({"served_model_name": ("m",)})
    good, out = write(tmp_path / "good.jsonl", GOOD), str(tmp_path / "out.jsonl")
    assert [batch(config, good, out) for _ in range(2)] == [0, 0]
    bad = write(tmp_path / "bad.jsonl", [*GOOD, line("bad", temperature=9)])
    assert [batch(config, bad, out) for _ in range(2)] == [1, 1]
    with caplog.at_level(logging.ERROR, "tokenspeed"):
        assert batch(config, good, "/dev/full") == 1
    errors = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert errors == [
        "cannot write /dev/full: No space left on device; "
        "the next run begins anew: /dev/full cannot be read again"
    ]
    assert len(engine) == 3, "nothing is started where nothing is left to do"


def test_failed_lines_are_named(
    engine: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config({"served_model_name": ("m",)})
    lines = [*GOOD, line("bad", temperature=9), "{", *("[]" for _ in range(20))]
    source = write(tmp_path / "in.jsonl", lines)
    assert batch(config, source, str(tmp_path / "out.jsonl"), concurrency=1) == 1
    told = [text for each in caplog.records if " failed: " in (text := each.getMessage())]
    first = len(GOOD) + 1
    assert told[0].startswith(f"line {first} ('bad') failed: 400: ") and "temperature" in told[0]
    assert told[1].startswith(f"line {first + 1} failed: no batch request: ")
    assert len(told) == 10 and told[-1].endswith("; what fails from here on is told in the output")


@pytest.mark.parametrize("left", ["duplicate", "new"])
def test_a_file_is_finished_when_every_line_is_answered(
    engine: list[Any], tmp_path: Path, left: str
) -> None:
    """Lines without an id of their own are known by their number."""
    config, out = make_config({"served_model_name": ("m",)}), str(tmp_path / "out.jsonl")
    lines = [*GOOD, "{", GOOD[0]]
    assert batch(config, write(tmp_path / "in.jsonl", lines), out) == 1
    assert batch(config, write(tmp_path / "in.jsonl", lines), out) == 1
    assert len(engine) == 1
    more = [*lines, GOOD[0] if left == "duplicate" else line("new")]
    assert batch(config, write(tmp_path / "in.jsonl", more), out) == 1
    assert len(engine) == 2
    assert len(read(Path(out))) == len(more)


@pytest.mark.parametrize("answered", [0, 2])
def test_standard_input_is_read_from_where_it_stands(
    engine: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answered: int
) -> None:
    """A shell that has read a line of the same file has taken it."""
    config, out = make_config({"served_model_name": ("m",)}), str(tmp_path / "out.jsonl")
    if answered:
        assert batch(config, write(tmp_path / "some.jsonl", GOOD[1 : 1 + answered]), out) == 0
    with open(write(tmp_path / "in.jsonl", [*GOOD, line("last")]), "rb") as file:
        file.readline()
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(file))  # whose buffer it is
        assert batch(config, "-", out) == 0
    names = {entry["custom_id"] for entry in read(Path(out))}
    assert names == {"b", "c", "last"}
