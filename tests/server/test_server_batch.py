"""Batch files: good and bad lines, resuming, torn and foreign outputs, failures of the engine."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from server_fakes import ANSWER, CHAT, COMPLETIONS, FakeClient, make_state

from tokenspeed.engine.client import EngineDead
from tokenspeed.server.batch import BatchCounts, run_batch
from tokenspeed.server.batch_files import BatchFileError, BatchOutput


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 90} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


GOOD = [line("a"), line("b", CHAT), line("c", n=2)]
BAD: list[tuple[Any, str | None, int | str]] = [
    (line("bad-value", temperature=9), "bad-value", 400),
    (line("bad-model", model="gpt-9"), "bad-model", 404),
    (line("streamed", stream=True), "streamed", 400),
    (line("too-long", prompt="x" * 999), "too-long", 400),
    (line("bad-url", "/v1/embeddings"), "bad-url", "invalid_url"),
    (line("a"), "a", "duplicate_custom_id"),
    (line("get") | {"method": "GET"}, "get", "invalid_url"),
    (line(7), None, "invalid_line"),
    (line(""), None, "invalid_line"),
    ({"custom_id": "no-url"}, None, "invalid_line"),
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


async def test_good_and_bad_lines(state: Any, tmp_path: Path) -> None:
    lines = [*GOOD, "", *(bad for bad, _, _ in BAD), line("last")]
    out = tmp_path / "out.jsonl"
    counts = await run_batch(state, write(tmp_path / "in.jsonl", lines), str(out), concurrency=3)
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
    assert not state.client.running and not state.num_samples


async def test_a_second_run_does_nothing(state: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", [*GOOD, *(bad for bad, _, _ in BAD)])
    out = tmp_path / "out.jsonl"
    await run_batch(state, source, str(out))
    before = out.read_bytes()
    asked = len(state.client.requests)
    counts = await run_batch(state, source, str(out))
    assert counts == BatchCounts(skipped=len(GOOD) + len(BAD))
    assert out.read_bytes() == before and len(state.client.requests) == asked


@pytest.mark.parametrize("cut", [1, 20, 150])
async def test_a_torn_last_line_is_done_again(state: Any, tmp_path: Path, cut: int) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    out = tmp_path / "out.jsonl"
    await run_batch(state, source, str(out), concurrency=1)
    whole = out.read_bytes()
    out.write_bytes(whole[:-cut])
    counts = await run_batch(state, source, str(out))
    assert counts == BatchCounts(completed=1, skipped=2)
    assert sorted(entry["custom_id"] for entry in read(out)) == ["a", "b", "c"]


async def test_a_dying_engine_blames_no_line(state: Any, tmp_path: Path) -> None:
    state.client.die_after = 150
    source = write(tmp_path / "in.jsonl", [line(f"{i}") for i in range(20)])
    out = tmp_path / "out.jsonl"
    with pytest.raises(EngineDead):
        await run_batch(state, source, str(out), concurrency=4)
    assert not state.client.running
    assert all(entry["response"]["status_code"] == 200 for entry in read(out))
    done = len(read(out))
    client = FakeClient()
    counts = await run_batch(make_state(client), source, str(out))
    assert counts == BatchCounts(completed=20 - done, skipped=done) and 0 < done < 20


async def test_a_full_queue_is_waited_for(tmp_path: Path) -> None:
    client = FakeClient()
    state = make_state(client, max_num_seqs=1, max_queued_requests=1)
    source = write(tmp_path / "in.jsonl", [line(f"{i}") for i in range(4)])
    counts = await run_batch(state, source, str(tmp_path / "out.jsonl"), concurrency=4)
    assert counts == BatchCounts(completed=4)


async def test_unusable_files(state: Any, tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    with pytest.raises(BatchFileError, match="cannot read"):
        await run_batch(state, str(tmp_path / "none.jsonl"), str(tmp_path / "out.jsonl"))
    with pytest.raises(BatchFileError, match="cannot write"):
        await run_batch(state, source, str(tmp_path))
    foreign = tmp_path / "notes.txt"
    foreign.write_text("my notes\n")
    with pytest.raises(BatchFileError, match="something else"):
        await run_batch(state, source, str(foreign))
    assert foreign.read_text() == "my notes\n"
    with pytest.raises(BatchFileError, match="something else"):
        await run_batch(state, source, source)
    with BatchOutput(str(tmp_path / "held.jsonl")):
        with pytest.raises(BatchFileError, match="another run"):
            await run_batch(state, source, str(tmp_path / "held.jsonl"))


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
    with pytest.raises(OSError, match="No space"):
        await run_batch(state, source, str(out), concurrency=1)
    monkeypatch.undo()
    assert [entry["custom_id"] for entry in read(out)] == ["a"]


async def test_stdin_and_stdout(
    state: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any
) -> None:
    source = write(tmp_path / "in.jsonl", GOOD)
    with open(source) as file:
        monkeypatch.setattr("sys.stdin", file)
        counts = await run_batch(state, "-", "-")
    assert counts.completed == 3
    written = capfdbinary.readouterr().out.splitlines()
    assert sorted(json.loads(text)["custom_id"] for text in written) == ["a", "b", "c"]
