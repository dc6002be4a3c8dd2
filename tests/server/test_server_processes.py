"""Several HTTP processes on one port, with one engine: as clients see them, and how they end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served_processes import KEY, Served, is_alive, serving, until
from test_server_tls import CERT
from test_server_tls import KEY as CERT_KEY
from tiny_checkpoint import CONFIG, write_tiny_checkpoint

from tokenspeed.server.listener import join, listen, share

PAGE = "https://page.example"
LIMITED = {"authorization": "Bearer limited"}
OPERATOR = {"authorization": "Bearer operator"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny model whose outputs may take a while."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("long"))
    config = CONFIG | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.fixture(scope="module")
def served(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One server for all tests that leave it as it was; how it ends is one of them."""
    words = ["--ssl-certfile", CERT, "--ssl-keyfile", CERT_KEY, "--allowed-origins", PAGE]
    words += ["--max-num-seqs", "4", "--max-queued-requests", "2", "--response-store-bytes", "0"]
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("limited max_requests=2\n")
    words += ["--api-key-file", str(keys), "--admin-api-key", "operator"]
    tls = ssl.create_default_context(cafile=CERT)
    tls.check_hostname = False
    with serving(model, *words, tls=tls) as made:
        yield made
        wait_idle(made)
        held = [made.stream(pid) for pid in made.pids]
        made.signal(signal.SIGTERM, signal.SIGTERM)
        for stream in held:
            assert '"code":"shutdown"' in stream.rest()
        assert made.end(seconds=10) == 0


def wait_idle(served: Served) -> None:
    for pid in served.pids:
        until(lambda pid=pid: served.figure(pid, "num_requests_running") == 0)
        until(lambda pid=pid: served.figure(pid, "kv_cache_usage_perc") == 0)


def test_all_processes_serve_all_alike(served: Served) -> None:
    """Routes, keys, TLS, CORS, limits, settings."""
    first, second = served.pids
    asked: list[tuple[str, str, Any, dict[str, str]]] = [
        *(("GET", path, None, {}) for path in ("/v1/models", "/v1/models/m", "/health", "/ready")),
        *(("GET", path, None, {}) for path in ("/server_info", "/openapi.json", "/version", "/")),
        ("GET", "/v1/models", None, {"authorization": "Bearer other"}),
        ("OPTIONS", "/v1/models", None, {"origin": PAGE, "access-control-request-method": "GET"}),
        ("GET", "/health", None, {"origin": "https://other.example"}),
        ("POST", "/v1/completions", {"prompt": "text needs a tokenizer"}, {}),
        ("POST", "/v1/completions", {"prompt": [5], "n": 7}, {}),
        ("POST", "/v1/responses", {"input": "x", "store": True}, {}),
        ("GET", "/v1/responses/resp_1", None, {}),
        ("POST", "/flush_cache", {}, {}),
        ("POST", "/flush_cache", {}, OPERATOR),
        ("GET", "/v1/models", None, OPERATOR),
        ("GET", "/nothing", None, {}),
    ]
    for method, path, body, headers in asked:
        answers = [served.ask(pid, method, path, body, **headers) for pid in (first, second)]
        for _, _, told in answers:
            assert told.pop("x-request-id", "") or method == "OPTIONS"
            told.pop("date", None)
        assert answers[0] == answers[1], path
    seen = [served.ask(pid, "GET", "/page/status")[1]["phases"] for pid in (first, second)]
    # A tiny model's phases may be over before the engine has a client to tell of them.
    assert seen[0] == seen[1] and seen[0][0]["name"] == "process"


def test_no_http_process_loads_torch(served: Served) -> None:
    for pid in served.pids:
        maps = Path(f"/proc/{pid}/maps").read_text()
        assert "libtorch" not in maps
    assert "libtorch" in Path(f"/proc/{served.engine}/maps").read_text()


def test_no_secret_is_on_a_command_line(served: Served) -> None:
    words = Path(f"/proc/{served.sibling}/cmdline").read_bytes().split(b"\0")
    assert words[1:] == [b"-P", b"-m", b"tokenspeed.server.process", b""]


def test_answers_are_the_same_and_counted_together(served: Served) -> None:
    before = served.figure(served.pid, "request_params_n_count")
    answers = [served.complete(pid) for pid in served.pids for _ in range(2)]
    assert len({answer["id"] for answer in answers}) == 4
    tokens = [answer["usage"] for answer in answers]
    assert all(usage["completion_tokens"] == 8 for usage in tokens)
    for pid in served.pids:  # a sum is shown again for a moment
        until(lambda pid=pid: served.figure(pid, "request_params_n_count") == before + 4)
        assert served.figure(pid, "engine_up") == 1
    figures = [served.figure(pid, "engine_steps_total") for pid in served.pids]
    assert figures[0] == figures[1]


def test_a_client_that_leaves_is_noticed_by_its_process(served: Served) -> None:
    wait_idle(served)
    for pid in served.pids:
        stream = served.stream(pid)
        until(lambda: served.figure(served.pid, "num_requests_running") == 1)
        stream.leave()
        wait_idle(served)


def test_the_operator_reaches_all_through_any(served: Served) -> None:
    first, second = served.pids
    streams = [served.stream(pid) for pid in (first, second, second)]
    abort = "/abort_request"
    for pid in (first, second):
        assert served.ask(pid, "POST", abort, {"abort_all": True})[0] == 403, "a key of a client"
    told = served.ask(first, "POST", abort, {"rid": streams[1].id}, **OPERATOR)[1]
    assert told == {"num_requests": 1} and '"code":"aborted"' in streams[1].rest()
    assert served.ask(second, "POST", "/pause_generation", {}, **OPERATOR)[0] == 200
    for pid in (first, second):
        until(lambda pid=pid: served.ask(pid, "GET", "/ready")[1]["status"] == "paused")
    assert served.ask(first, "POST", "/continue_generation", {}, **OPERATOR)[0] == 200
    until(lambda: served.ask(second, "GET", "/ready")[0] == 200)
    told = served.ask(second, "POST", abort, {"abort_all": True}, **OPERATOR)[1]
    assert told == {"num_requests": 2}
    for stream in (streams[0], streams[2]):
        assert '"code":"aborted"' in stream.rest()
    wait_idle(served)


def test_the_queue_is_one(served: Served) -> None:
    first, second = served.pids
    streams = [served.stream(pid) for pid in (first, second, first, second)]
    body = {"prompt": [5], "n": 3}
    for pid in (first, second):
        status, told, _ = served.ask(pid, "POST", "/v1/completions", body)
        assert (status, told["error"]["code"]) == (429, "rate_limit_exceeded")
    for stream in streams:
        stream.leave()
    wait_idle(served)
    assert served.complete(second, n=3)["usage"]["completion_tokens"] == 24


def test_a_key_s_limit_is_one(served: Served) -> None:
    streams = [served.stream(pid, **LIMITED) for pid in served.pids]
    for pid in served.pids:
        status, told, headers = served.ask(pid, "GET", "/v1/models", **LIMITED)
        assert (status, headers["retry-after"]) == (429, "1")
        assert "2 are taken at once" in told["error"]["message"]
        assert served.ask(pid, "GET", "/v1/models")[0] == 200
    for stream, pid in zip(streams, reversed(served.pids), strict=True):
        stream.leave()
        until(lambda pid=pid: served.ask(pid, "GET", "/v1/models", **LIMITED)[0] == 200)


@pytest.mark.parametrize(
    "how",
    [
        signal.SIGKILL,
        *(pytest.param(each, marks=pytest.mark.long) for each in (signal.SIGTERM, signal.SIGSTOP)),
    ],
    ids=str,
)
def test_a_sibling_that_ends_is_started_again(served: Served, how: signal.Signals) -> None:
    """What it served is aborted in the engine, or drained first; the others go on. One that is
    stopped hangs, and is killed.
    """
    wait_idle(served)
    lost = served.sibling
    kept = served.stream(served.pid, 800)
    stream = served.stream(lost, 50 if how == signal.SIGTERM else 8000, **LIMITED)
    held = served.figure(served.pid, "request_params_n_count")
    files = set(served.folder.rglob("*.db"))
    os.kill(lost, how)
    if how == signal.SIGTERM:
        assert stream.rest().endswith("[DONE]\n\n")
    else:
        stream.leave()
    until(lambda: not is_alive(lost))
    assert kept.rest().endswith("[DONE]\n\n")
    until(lambda: served._children(b"tokenspeed.server.process"))
    assert served.sibling != lost
    assert served.complete(served.sibling)["usage"]["completion_tokens"] == 8
    wait_idle(served)
    assert "is started again" in " ".join(served.log().split())
    assert served.figure(served.sibling, "request_params_n_count") >= held, "counts stay"
    assert set(served.folder.rglob("*.db")) == files, "and take no more room"
    assert served.ask(served.sibling, "GET", "/page/status")[1]["phases"]
    assert len({served.complete(pid)["id"] for pid in served.pids}) == 2
    both = [served.stream(pid, **LIMITED) for pid in served.pids]  # no place of the key is lost
    for each in both:
        each.leave()


@pytest.mark.long
def test_a_first_process_that_hangs_holds_nobody_up(served: Served) -> None:
    """The others answer what they can alone, and refuse the rest in time."""
    with contextlib.closing(served.connect(served.sibling)) as connection:

        def status(headers: dict[str, str]) -> int:
            connection.request("GET", "/v1/models", headers=headers)
            with connection.getresponse() as answer:
                answer.read()
                return answer.status

        assert [status(KEY), status(LIMITED)] == [200, 200]
        os.kill(served.pid, signal.SIGSTOP)
        try:
            assert [status(KEY), status(LIMITED), status(LIMITED)] == [200, 503, 503]
        finally:
            os.kill(served.pid, signal.SIGCONT)
        until(lambda: status(LIMITED) == 200)
    wait_idle(served)


@pytest.mark.long
def test_the_engine_s_end_is_everybody_s(model: str) -> None:
    with serving(model) as made:
        streams = [made.stream(pid) for pid in made.pids]
        os.kill(made.engine, signal.SIGKILL)
        for stream in streams:
            assert '"code":"engine_dead"' in stream.rest()
        assert made.end() == 1
        assert made.log().count("the engine is dead: ") == 1


def test_an_engine_that_is_started_again_is_everybody_s(model: str) -> None:
    """What ran in it ends with an error in each process; then all serve as before, until the limit
    is reached.
    """
    with serving(model, "--engine-restarts", "1") as made:
        expected = made.complete(made.pid)["choices"]
        pids, lost = made.pids, made.engine
        streams = [made.stream(pid) for pid in pids]
        os.kill(lost, signal.SIGKILL)
        for stream in streams:
            assert '"code":"engine_dead"' in stream.rest()
        for pid in pids:
            assert made.ask(pid, "GET", "/health")[0] == 200
            for method, path, body in (
                ("GET", "/ready", None),
                ("POST", "/v1/completions", {"prompt": [5]}),
            ):
                status, _, headers = made.ask(pid, method, path, body)
                assert status == 503 and int(headers["retry-after"]) > 0
            assert made.figure(pid, "engine_up") == 0
        for pid in pids:
            until(lambda pid=pid: made.ask(pid, "GET", "/ready")[0] == 200)
            assert made.complete(pid)["choices"] == expected
        assert made.pids == pids and made.find_engine() != lost
        told = " ".join(made.log().split())
        assert "killed by SIGKILL" in told and "it is started again, 1 of 1 times" in told
        assert "the engine serves again after" in told
        os.kill(made.engine, signal.SIGKILL)
        assert made.end() == 1
        assert "it has been started again 1 times (--engine-restarts)" in made.log()


@pytest.mark.long
def test_nothing_is_left_when_the_first_is_killed(model: str) -> None:
    with serving(model) as made:
        streams = [made.stream(pid) for pid in made.pids]
        made.signal(signal.SIGKILL)
        assert made.end() == -signal.SIGKILL
        for stream in streams:
            stream.connection.close()


@pytest.mark.long
def test_a_drain_waits_for_all(model: str) -> None:
    with serving(model, "--shutdown-timeout", "60") as made:
        stream = made.stream(made.sibling, 800)
        began = time.monotonic()
        made.signal(signal.SIGTERM)
        assert stream.rest().endswith("[DONE]\n\n")
        assert made.end() == 0
        assert time.monotonic() - began < 55


@pytest.mark.long
def test_a_drain_has_its_limit_everywhere(model: str) -> None:
    with serving(model, "--shutdown-timeout", "0.5") as made:
        streams = [made.stream(pid) for pid in made.pids]
        made.signal(signal.SIGTERM)
        for stream in streams:
            assert '"code":"shutdown"' in stream.rest()
        assert made.end(seconds=15) == 0


def test_a_port_is_taken_alone_before_it_is_shared() -> None:
    with listen("127.0.0.1", 0, 5.0) as first:
        address = first.getsockname()
        with pytest.raises(OSError, match="in use"):
            join(first.family, address, 5.0)
        share(first)
        with join(first.family, address, 5.0) as second:
            with pytest.raises(OSError, match="in use"):
                listen("127.0.0.1", address[1], 5.0)
            found: set[socket.socket] = set()
            with pytest.MonkeyPatch.context():
                for _ in range(64):
                    with socket.create_connection(address, 5.0):
                        pass
            for listener in (first, second):
                listener.setblocking(False)
                try:
                    listener.accept()[0].close()
                    found.add(listener)
                except BlockingIOError:
                    pass
            assert found == {first, second}
