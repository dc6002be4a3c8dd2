"""The load generator against a scripted server: what arrives whole, and what does not, by kind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tokenspeed.bench import progress
from tokenspeed.bench import serve as bench_serve
from tokenspeed.bench.answer import Record
from tokenspeed.bench.dataset import one_request
from tokenspeed.bench.http_client import Address, BadURL, HttpClient
from tokenspeed.bench.load import Load, Requests, limit_of
from tokenspeed.bench.serve_plan import make_plan
from tokenspeed.cli.bench_serve import read
from tokenspeed.cli.main import main
from tokenspeed.options import ConfigError

EVENTS = b"".join(
    b"data: " + json.dumps(each).encode() + b"\n\n"
    for each in (
        {"id": "1", "choices": [{"text": "a", "finish_reason": None}]},
        {"id": "1", "choices": [{"text": "b", "finish_reason": "length"}]},
        {"id": "1", "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2}},
    )
)
WHOLE = EVENTS + b"data: [DONE]\n\n"
MODELS = b'{"data": [{"id": "served"}]}'
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(body: bytes, size: int = 7) -> bytes:
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


def sized(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


GOOD = HEAD + chunked(WHOLE) + b"0\r\n\r\n"


class Server:
    """Answers POSTs with `answer`, byte for byte, and closes after it if `closes`."""

    def __init__(self, answer: bytes, *, closes: bool = False, hangs: bool = False) -> None:
        self.answer, self.closes, self.hangs = answer, closes, hangs
        self.num_connections = 0
        self.bodies: list[Any] = []
        self.headers: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                if head.startswith(b"GET "):
                    writer.write(sized(200, MODELS))
                    continue
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                self.headers.append(head)
                self.bodies.append(json.loads(await reader.readexactly(length)))
                writer.write(self.answer)
                if self.hangs:
                    await reader.read()
                if self.closes:
                    break
        writer.close()


Start = Callable[[Server], Awaitable[str]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a server; gives its address."""
    async with contextlib.AsyncExitStack() as stack:

        async def begin(server: Server) -> str:
            listening = await asyncio.start_server(server, "127.0.0.1", 0)
            stack.callback(listening.close)
            return f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"

        yield begin


async def load(url: str, count: int = 1, *, timeout_s: float = 30.0) -> list[Record]:
    client = HttpClient(Address.parse(url), {"authorization": "Bearer k"})
    ask = Requests(
        endpoint="/v1/completions",
        is_chat=False,
        model="m",
        fields={},
        must_be_full=True,
        timeout_s=timeout_s,
    )
    run = Load(client, ask, limit_of(1))
    await run.run([one_request([5, 6], 2, 2)] * count, [0.0] * count)
    client.close()
    return run.records


async def test_whole_answers_over_one_connection(start: Start) -> None:
    server = Server(GOOD)
    records = await load(await start(server), 5)
    assert [record.failure for record in records] == [None] * 5
    assert {(each.text, each.output_len, each.input_len) for each in records} == {("ab", 2, 3)}
    assert server.num_connections == 1 and b"Bearer k" in server.headers[0]
    assert server.bodies[0]["stream_options"] == {"include_usage": True}
    assert (server.bodies[0]["prompt"], server.bodies[0]["max_tokens"]) == ([5, 6], 2)


async def test_a_kept_connection_that_was_closed_is_no_failure(start: Start) -> None:
    server = Server(GOOD, closes=True)
    records = await load(await start(server), 3)
    assert [record.failure for record in records] == [None] * 3
    assert server.num_connections == 3


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HEAD + chunked(WHOLE), "cut stream"),  # no last chunk
        (HEAD + chunked(WHOLE)[:-9], "cut stream"),
        (HEAD + chunked(EVENTS) + b"0\r\n\r\n", "cut stream"),
        (HEAD + chunked(b"data: [DONE]\n\n") + b"0\r\n\r\n", "cut stream"),
        (b"", "cut stream"),
        (b"nonsense\r\n\r\n", "cut stream"),
        (sized(429, b'{"error": {"message": "busy"}}'), "HTTP 429"),
        (sized(200, b'data: {"error": {"message": "x"}}\n\ndata: [DONE]\n\n'), "error event"),
        (sized(200, WHOLE.replace(b'"completion_tokens": 2', b'"completion_tokens": 1')),
         "fewer tokens than asked"),
    ],
)  # fmt: skip
async def test_failures_by_kind(start: Start, answer: bytes, kind: str) -> None:
    (record,) = await load(await start(Server(answer, closes=True)))
    assert (record.failure, bool(record.detail)) == (kind, True)


class Endless(Server):
    """Goes on for as long as somebody reads."""

    num_bytes = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, part = self.answer.split(b"|")
        with contextlib.suppress(ConnectionError):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(head)
            while True:
                writer.write(part)
                await writer.drain()
                self.num_bytes += len(part)
        writer.close()


CHUNK = b"data: " + json.dumps({"choices": [{"text": "x" * 5000}]}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (HEAD + b"|" + chunked(CHUNK, len(CHUNK)), "endless answer"),
        (HEAD + b"|" + chunked(b": ping\n\n" * 1000, 8000), "endless answer"),
        (HEAD + chunked(b"data: ") + b"|" + chunked(b"x" * 8000, 8000), "endless answer"),
        (HEAD + b"|" + chunked(b"data\n" * 1000, 5000), "endless answer"),
        (HEAD + chunked(b"data: {\n\n") + b"|" + chunked(CHUNK, len(CHUNK)), "malformed event"),
        (HEAD.replace(b"200", b"500") + b"|" + chunked(b"x" * 8000, 8000), "HTTP 500"),
    ],
)
async def test_what_has_no_end_fails_long_before_its_timeout(
    start: Start, answer: bytes, kind: str
) -> None:
    server = Endless(answer)
    async with asyncio.timeout(10):
        (record,) = await load(await start(server))
    assert record.failure == kind and server.num_bytes < 12 << 20


async def test_a_silent_server_is_a_timeout_and_none_a_connection_failure(start: Start) -> None:
    (record,) = await load(await start(Server(HEAD, hangs=True)), timeout_s=0.05)
    assert record.failure == "timeout"
    (record,) = await load("http://127.0.0.1:1")
    assert record.failure == "connection"


async def test_an_interrupt_keeps_what_was_measured(start: Start) -> None:
    server = Server(GOOD)
    words = ["--base-url", await start(server), "--num-prompts", "1000", "--request-rate", "50"]
    plan = make_plan(read([*words, "--random-output-len", "2"]), {})
    loop = asyncio.get_running_loop()
    loop.call_later(0.4, os.kill, os.getpid(), signal.SIGINT)
    measured = await bench_serve.measure(plan)
    assert measured.was_interrupted and measured.model == "served"
    assert 1 <= len(measured.records) < 1000
    assert all(record.failure is None for record in measured.records)


async def test_a_warm_up_that_fails_ends_it(start: Start) -> None:
    url = await start(Server(sized(400, b"no such field")))
    plan = make_plan(read(["--base-url", url]), {"OPENAI_API_KEY": "k"})
    assert plan.headers == {"authorization": "Bearer k"}
    with pytest.raises(bench_serve.BenchFailed, match="HTTP 400: no such field"):
        await bench_serve.measure(plan)


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--port", "1", "--ready-check-timeout-sec", "0.1"]) == 1
    waiting, failed = capsys.readouterr().err.splitlines()
    assert waiting.startswith("waiting up to 0.1 s for http://127.0.0.1:1: ")
    assert "error: bench serve: http://127.0.0.1:1: the server is not ready" in failed


async def test_a_load_is_told_of_on_a_pipe(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "INTERVAL_S", 0.1)
    url = await start(Server(GOOD))
    words = ["--base-url", url, "--num-prompts", "30", "--request-rate", "50"]
    for hidden in ([], ["--disable-tqdm"]):
        await bench_serve.measure(
            make_plan(read([*words, *hidden, "--random-output-len", "2"]), {})
        )
        first, *lines = capsys.readouterr().err.splitlines() or [""]
        assert first == ("" if hidden else f"30 requests to served at {url}")
        assert bool(lines) is not bool(hidden)
        assert all(re.fullmatch(r"\d+ of 30 requests have ended after \d+ s", e) for e in lines)


@pytest.mark.parametrize("url", ["http://a:80", "https://[::1]:9/b", "http://127.0.0.1:8000"])
def test_addresses_are_shown_as_they_are_written(url: str) -> None:
    assert Address.parse(url).url == url


@pytest.mark.parametrize(
    "words",
    [
        ["model"],
        ["--goodput", "itl:5"],
        ["--goodput", "ttft:-1"],
        ["--goodput", "ttft:nan"],
        ["--request-rate", "0"],
        ["--request-rate", "nan"],
        ["--metric-percentiles", "101"],
        ["--percentile-metrics", "ttft,x"],
        ["--extra-body", "[]"],
        ["--metadata", "x"],
        ["--base-url", "ftp://x"],
        ["--base-url", "http://x:99999999"],
        ["--dataset-name", "custom"],
        ["--dataset-path", "file"],
        ["--tokenizer", "/nowhere/at/all"],
    ],
)
def test_what_cannot_be_asked_is_refused_in_one_line(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_names_of_other_benchmarks_are_known() -> None:
    words = ["--dataset-name", "generated-shared-prefix", "--gsp-num-groups", "3"]
    words += ["--gsp-system-prompt-len", "9", "--sharegpt-output-len", "7"]
    found = read([*words, "--backend", "openai-chat"])
    assert (found.dataset.dataset_name, found.endpoint) == ("shared-prefix", "/v1/chat/completions")
    assert (found.dataset.shared_prefix_groups, found.dataset.shared_prefix_len) == (3, 9)
    assert found.dataset.random_output_len == 7


def test_results_are_written_where_asked(tmp_path: Path) -> None:
    named = read(["--result-dir", str(tmp_path), "--output-json", "r.json"])
    assert bench_serve.serve_report.path(named, "a/b") == tmp_path / "r.json"
    unnamed = bench_serve.serve_report.path(read(["--save-result", "--request-rate", "2"]), "a/b")
    assert unnamed is not None and unnamed.name.startswith("openai-2qps-a-b-")
    assert bench_serve.serve_report.path(read([]), "a/b") is None


@pytest.mark.parametrize("url", ["x", "http://", "http://u:p@x", "http://x/?a", "https://[::1"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(BadURL):
        Address.parse(url)


def test_addresses() -> None:
    assert Address.parse("https://h/base/") == Address("h", 443, True, "/base")
    assert Address.parse("http://[::1]:81") == Address("::1", 81, False, "")
    with pytest.raises(ConfigError):
        read(["--port", "0"])
