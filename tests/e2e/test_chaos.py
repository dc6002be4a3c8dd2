"""What befalls a server: its engine is killed or held in every phase, and its port is taken.

An engine that is gone ends the server unless it is started again by option, and says so to
everybody; one that hangs is waited for.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served import Served, served, wait_for, write_long_checkpoint

long = pytest.mark.long
LONG = 12_000
PROMPT = [(7 * i) % 190 + 8 for i in range(LONG)]
PHASES = ["prefill", "decode"]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """A server whose prefill and whose decode take seconds."""
    model = write_long_checkpoint(tmp_path_factory.mktemp("long"), 2 * LONG)
    return (
        *(model, "--skip-tokenizer-init", "--device", "cpu", "-O0"),
        *("--max-total-tokens", str(4 * LONG), "--chunked-prefill-size", "16"),
        *("--watchdog-timeout", "1"),
    )


def body(phase: str, **fields: Any) -> dict[str, Any]:
    prompt = PROMPT if phase == "prefill" else PROMPT[:5]
    asked = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
    return asked | fields


def ask(server: Served, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body("decode", **fields), timeout=60)


class Held:
    """A stream and a whole answer, both in the same phase of the engine's work."""

    def __init__(self, server: Served, phase: str, num_tokens: int = LONG) -> None:
        self.server, self.phase = server, phase
        fields = {"max_tokens": 8 if phase == "prefill" else num_tokens, "ignore_eos": True}
        self._fields = fields
        self._threads = ThreadPoolExecutor(1)

    def __enter__(self) -> Held:
        url = f"{self.server.url}/v1/completions"
        asked = body(self.phase, stream=True, **self._fields)
        self._streaming = httpx.stream("POST", url, json=asked, timeout=60)
        answer = self._streaming.__enter__()
        assert answer.status_code == 200
        self._lines = answer.iter_lines()
        self.whole: Future[httpx.Response] = self._threads.submit(
            httpx.post, url, json=body(self.phase, **self._fields), timeout=60
        )
        if self.phase == "decode":
            assert next(self._lines).startswith("data: {")
        wait_for(lambda: self.server.num_requests() == 2)
        return self

    def __exit__(self, *_: object) -> None:
        self._streaming.__exit__(None, None, None)
        self._threads.shutdown()

    def events(self) -> list[Any]:
        """What is left of the stream, which must end in order."""
        lines = [line for line in self._lines if line and not line.startswith(":")]
        assert lines[-1] == "data: [DONE]", lines[-3:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


@long
@pytest.mark.parametrize("phase", ["load", *PHASES])
def test_a_killed_engine_ends_all_with_the_reason(words: tuple[str, ...], phase: str) -> None:
    with served(*words) as server:
        if phase == "load":
            os.kill(server.engine_id, signal.SIGKILL)
        else:
            server.wait_ready()
            with Held(server, phase) as held:
                os.kill(server.engine_id, signal.SIGKILL)
                events = held.events()
                assert phase == "decode" or len(events) == 1, "it was not in its prefill"
                assert events[-1]["error"]["code"] == "engine_dead"
                answer = held.whole.result()
                assert answer.status_code >= 500
                assert answer.json()["error"]["code"] == "engine_dead"
                assert answer.headers["x-should-retry"] == "false"
                assert server.status("/health") in (503, 0)
        assert server.end(15) == 1
        assert "SIGKILL" in server.log and "Traceback" not in server.log


@long
def test_a_killed_engine_is_started_again_by_option(words: tuple[str, ...]) -> None:
    with served(*words, "--engine-restarts", "2") as server:
        server.wait_ready()
        expected = ask(server).json()["choices"]
        for phase in PHASES:
            with Held(server, phase) as held:
                os.kill(server.engine_id, signal.SIGKILL)
                assert held.events()[-1]["error"]["code"] == "engine_dead"
                assert held.whole.result().headers["x-should-retry"] == "false"
            assert (server.status("/health"), server.status("/ready")) == (200, 503)
            answer = ask(server)
            assert answer.status_code == 503 and "retry-after" in answer.headers
            server.wait_ready()
            assert ask(server).json()["choices"] == expected
        server.wait_idle()
        os.kill(server.engine_id, signal.SIGKILL)
        assert server.end(15) == 1
        assert "started again 2 times (--engine-restarts)" in " ".join(server.log.split())


@long
def test_a_held_engine_that_loads_is_waited_for(words: tuple[str, ...]) -> None:
    with served(*words) as server:
        os.kill(server.engine_id, signal.SIGSTOP)
        wait_for(lambda: server.status("/health") == 200)
        time.sleep(2)
        assert (server.status("/health"), server.status("/ready")) == (200, 503)
        answer = ask(server)
        assert answer.status_code == 503 and "retry-after" in answer.headers
        os.kill(server.engine_id, signal.SIGCONT)
        server.wait_ready()
        assert ask(server).status_code == 200
        assert server.terminate() == 0


@long
def test_a_start_that_takes_too_long_ends_a_held_engine_too(words: tuple[str, ...]) -> None:
    with served(*words, "--engine-startup-timeout", "3") as server:
        os.kill(server.engine_id, signal.SIGSTOP)
        assert server.end() == 1
        assert "--engine-startup-timeout" in server.log and "Traceback" not in server.log


@pytest.fixture(scope="module")
def server(words: tuple[str, ...]) -> Iterator[Served]:
    """For what is survived."""
    with served(*words) as server:
        server.wait_ready()
        yield server
        server.wait_idle()
        assert server.gauge("kv_cache_usage_perc") == 0
        assert server.terminate() == 0


@long
@pytest.mark.parametrize("phase", PHASES)
def test_a_held_engine_goes_on_where_it_was(server: Served, phase: str) -> None:
    num_tokens = 1000
    with Held(server, phase, num_tokens) as held:
        os.kill(server.engine_id, signal.SIGSTOP)
        wait_for(lambda: server.status("/ready") == 503, 10)
        assert server.status("/health") == 200
        refused = ask(server)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "stalled"
        assert "retry-after" in refused.headers and not held.whole.done()
        os.kill(server.engine_id, signal.SIGCONT)
        choices = [event["choices"][0] for event in held.events()]
        whole = held.whole.result().json()["choices"][0]
    ids = [id for choice in choices for id in choice["token_ids"]]
    fields = body(phase, ignore_eos=True, max_tokens=len(whole["token_ids"]))
    expected = ask(server, **fields).json()["choices"][0]["token_ids"]
    assert whole["token_ids"] == expected and expected[-len(ids) :] == ids
    assert choices[-1]["finish_reason"] == whole["finish_reason"] == "length"
    assert server.status("/ready") == 200


@long
@pytest.mark.parametrize("streams", [True, False])
def test_clients_may_leave_a_held_engine(server: Served, streams: bool) -> None:
    os.kill(server.engine_id, signal.SIGSTOP)
    url, asked = f"{server.url}/v1/completions", body("decode", max_tokens=LONG, stream=streams)
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url, json=asked, timeout=0.2)
    os.kill(server.engine_id, signal.SIGCONT)
    wait_for(lambda: server.num_requests() == 0, 5)
    assert ask(server).status_code == 200


@long
def test_a_server_ends_in_time_though_its_engine_is_held(words: tuple[str, ...]) -> None:
    with served(*words, "--drain-timeout", "1") as server:
        server.wait_ready()
        with Held(server, "decode") as held:
            os.kill(server.engine_id, signal.SIGSTOP)
            server.process.send_signal(signal.SIGTERM)
            assert held.events()[-1]["error"]["code"] == "shutdown"
            assert held.whole.result().status_code == 503
        assert server.end(20) == 0


def test_a_taken_port_is_found_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "tokenspeed", "serve", "smollm2", "--port", port]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    line = done.stderr.splitlines()[-1]
    assert port in line and "--port" in line and "engine" not in done.stderr
