"""Streams and whole answers when the client leaves, stalls or waits, and when the engine fails."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from server_fakes import CHAT, COMPLETIONS, Asker, FakeClient, make_state

from tokenspeed.engine.attached import EngineDead
from tokenspeed.request import FinishReason, RequestDelta
from tokenspeed.server import stream
from tokenspeed.server.errors import unavailable
from tokenspeed.structured.host import GrammarHost


class Connection:
    """One request, seen from below the application: what it sends, and when its client leaves."""

    def __init__(self, ask: Asker, path: str, **fields: Any) -> None:
        asked: Any = {CHAT: {"messages": [{"role": "user", "content": "x"}]}}
        body = asked.get(path, {"prompt": "x"}) | {"max_tokens": 90, "ignore_eos": True} | fields
        self.status, self.body = 0, b""
        self.is_complete = False
        self.left = asyncio.Event()
        self.delay_s = 0.0
        self.writes: list[bytes] = []
        self._body: bytes | None = json.dumps(body).encode()
        scope = {"type": "http", "method": "POST", "path": path, "headers": [], "root_path": ""}
        self.task = asyncio.create_task(ask.app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        await asyncio.sleep(self.delay_s)
        self.writes.append(message["body"])
        self.body += message["body"]
        self.is_complete = not message.get("more_body", False)

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("queued", [True, False])
async def test_leaving_clients_abort_all_their_samples(
    ask: Asker, path: str, streams: bool, queued: bool
) -> None:
    ask.engine.pause_s = 0.01
    if queued:
        ask.engine.gate.clear()
    connections = [Connection(ask, path, stream=streams, n=4) for _ in range(5)]
    await connections[0].until(lambda: len(ask.engine.running) == 20)
    if streams and not queued:
        await connections[0].until(lambda: b"data:" in connections[0].body)
    for connection in connections:
        connection.left.set()
        await asyncio.wait_for(connection.task, 5)
        assert not connection.is_complete
    assert len(ask.engine.aborted) == 20 and not ask.engine.running
    metrics = (await ask.http.get("/metrics")).text
    assert 'request_success_total{finished_reason="abort",model_name="m"} 20.0' in metrics
    assert f'method="POST",path="{path}",status="499"}} 5.0' in metrics
    ask.engine.gate.set()
    ask.engine.pause_s = 0


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("busy_with", ["a grammar", "a text"])
async def test_clients_that_leave_while_they_are_prepared_are_waited_for_no_longer(
    ask: Asker, monkeypatch: pytest.MonkeyPatch, streams: bool, busy_with: str
) -> None:
    fields: dict[str, Any] = {"stream": streams}
    if busy_with == "a grammar":
        monkeypatch.setattr(GrammarHost, "open", lambda self, job: None)  # as if one never came
        fields |= {"guided_regex": "never_ready", "ignore_eos": False}
    else:
        monkeypatch.setattr(ask.state.offload, "run", lambda *_: asyncio.Event().wait())
    connection = Connection(ask, CHAT, **fields)
    await connection.until(lambda: ask.state.num_active)
    await asyncio.sleep(0.02)
    connection.left.set()
    await asyncio.wait_for(connection.task, 2)
    assert not connection.is_complete and not ask.state.grammars.num_waiting
    monkeypatch.undo()


async def test_bodies_that_come_in_at_once_are_bounded_together() -> None:
    """Eight of the largest size: one more that comes is refused, and nobody else."""
    client = FakeClient()
    ask = Asker(client, make_state(client, max_request_bytes=4096))
    half = b'{"prompt": "x", "max_tokens": 2, "user": "' + b"y" * 4000
    scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "root_path": ""}
    go_on, statuses = asyncio.Event(), []

    async def post(is_slow: bool) -> None:
        parts = [half, b'"}']

        async def receive() -> dict[str, Any]:
            if len(parts) == 1 and is_slow:
                await go_on.wait()
            if not parts:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])

        await ask.app(scope, receive, send)

    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(post(True))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await post(False)
        assert statuses == [503]
        go_on.set()
    await post(False)
    assert statuses == [503] + [200] * 9


async def test_pings_while_nothing_comes(ask: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "PING_AFTER_S", 0.02)
    ask.engine.gate.clear()
    connection = Connection(ask, CHAT, stream=True, max_tokens=2)
    await connection.until(lambda: connection.body.count(b": ping\n\n") >= 2)
    assert connection.status == 200 and b"data:" not in connection.body
    ask.engine.gate.set()
    await connection.task
    assert connection.body.endswith(b"data: [DONE]\n\n") and connection.is_complete


async def test_pings_while_nothing_that_comes_shows(
    ask: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PING_AFTER_S", 0.02)

    async def silent(request: Any) -> Any:
        while connection.body.count(b": ping\n\n") < 2:
            await asyncio.sleep(0.002)
            yield RequestDelta(request_id=request.id, token_ids=[])
        yield RequestDelta(request_id=request.id, token_ids=[5], finish_reason=FinishReason.LENGTH)

    monkeypatch.setattr(ask.engine, "generate", silent)
    connection = Connection(ask, COMPLETIONS, stream=True)
    async with asyncio.timeout(5):
        await connection.task
    assert connection.body.startswith(b": ping\n\n") and connection.is_complete
    assert b'"finish_reason":"length"' in connection.body


def error_of(body: bytes) -> Any:
    *_, last, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    return json.loads(last.removeprefix(b"data: "))["error"]


async def test_engine_death_in_a_stream_is_an_event() -> None:
    client = FakeClient()
    client.pause_s = 0.001
    client.die_after = 3
    ask = Asker(client, make_state(client))
    connection = Connection(ask, CHAT, stream=True)
    await connection.task
    error = error_of(connection.body)
    assert connection.status == 200 and b'"content"' in connection.body
    assert (error["type"], error["code"]) == ("server_error", "engine_dead")


async def test_a_failing_request_is_an_event_and_no_other_suffers(ask: Asker) -> None:
    good = ask.engine.generate

    async def failing(request: Any) -> Any:
        yield RequestDelta(request_id=request.id, token_ids=[5])
        raise ValueError("a secret of /etc/passwd")

    async def refusing(request: Any) -> Any:
        yield RequestDelta(request_id=request.id, finish_reason=FinishReason.ERROR, error="no page")

    async def dying(request: Any) -> Any:
        raise EngineDead("gone")
        yield

    for broken, words in (
        (failing, "log has the cause"),
        (refusing, "no page"),
        (dying, "stopped"),
    ):
        ask.engine.generate = broken
        connection = Connection(ask, COMPLETIONS, stream=True)
        other = Connection(ask, COMPLETIONS, stream=False)
        await asyncio.gather(connection.task, other.task)
        assert words in error_of(connection.body)["message"]
        assert b"secret" not in connection.body + other.body
        assert other.status == 500 and words.encode() in other.body
    ask.engine.generate = good


async def test_what_the_engine_refuses_is_a_bad_request(ask: Asker) -> None:
    async def refusing(request: Any) -> Any:
        yield RequestDelta(
            request_id=request.id,
            finish_reason=FinishReason.ERROR,
            error="no token may be sampled",
            is_refusal=True,
        )

    ask.engine.generate, good = refusing, ask.engine.generate
    for path in (COMPLETIONS, CHAT):
        streaming = Connection(ask, path, stream=True)
        whole = Connection(ask, path, stream=False)
        await asyncio.gather(streaming.task, whole.task)
        for error in (error_of(streaming.body), json.loads(whole.body)["error"]):
            assert error["type"] == "invalid_request_error"
            assert "no token may be sampled" in error["message"]
        assert whole.status == 400
    ask.engine.generate = good


async def test_stopping_everything_ends_streams_with_an_event() -> None:
    client = FakeClient()
    client.pause_s = 0.01
    ask = Asker(client, make_state(client))
    streaming, whole = (Connection(ask, CHAT, stream=streams) for streams in (True, False))
    await streaming.until(lambda: b"content" in streaming.body)
    assert not ask.state.idle.is_set()
    ask.state.stop_all(unavailable("The server has shut down.", "shutdown"))
    await asyncio.wait_for(ask.state.idle.wait(), 2)
    await asyncio.gather(streaming.task, whole.task)
    assert error_of(streaming.body)["code"] == "shutdown"
    assert whole.status == 503 and len(client.aborted) == 2
    late = Connection(ask, CHAT)
    await late.task
    assert late.status == 503 and not client.running


async def test_one_failing_sample_ends_its_request(ask: Asker) -> None:
    good = ask.engine.generate

    def generate(request: Any) -> Any:
        async def failing() -> Any:
            yield RequestDelta(request_id=request.id, token_ids=[5])
            await asyncio.sleep(0.03)
            raise ValueError

        return failing() if request.sample_index == 1 else good(request)

    ask.engine.generate, ask.engine.pause_s = generate, 0.01
    for streams in (True, False):
        connection = Connection(ask, CHAT, stream=streams, n=3)
        await asyncio.wait_for(connection.task, 1)
        assert connection.status == (200 if streams else 500)
        assert len(ask.engine.aborted) == 2
        ask.engine.aborted.clear()
    ask.engine.generate, ask.engine.pause_s = good, 0


async def test_ready_tokens_share_an_event(ask: Asker) -> None:
    """Everything that came while the client took its time goes out together, and nothing is lost:
    text, ids, log-probabilities, cached tokens and usage are those of the whole answer.
    """
    ask.engine.answer = "abcdefghijklmnopqrst"
    fields = {"max_tokens": 20, "n": 2, "logprobs": 1, "return_token_ids": True}
    whole, slow = (
        Connection(ask, COMPLETIONS, stream=streams, **fields, stream_options=options)
        for streams, options in ((False, None), (True, {"include_usage": True}))
    )
    slow.delay_s = 0.03
    await asyncio.gather(whole.task, slow.task)
    *blocks, done, _ = slow.body.split(b"\n\n")
    assert done == b"data: [DONE]" and len(blocks) < 20
    chunks = [json.loads(block.removeprefix(b"data: ")) for block in blocks]
    answer = json.loads(whole.body)
    assert chunks[-1]["usage"] == answer["usage"]
    for index, expected in enumerate(answer["choices"]):
        parts = [each for chunk in chunks for each in chunk["choices"] if each["index"] == index]
        assert "".join(part["text"] for part in parts) == expected["text"]
        assert [id for part in parts for id in part["token_ids"]] == expected["token_ids"]
        scores = [score for part in parts for score in part["logprobs"]["token_logprobs"]]
        assert scores == expected["logprobs"]["token_logprobs"] and len(scores) == 20
        assert [part["finish_reason"] for part in parts][-1] == expected["finish_reason"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("after", [0, 1, 2])
async def test_an_engine_that_dies_before_a_sample_is_sent(
    path: str, streams: bool, after: int
) -> None:
    client = FakeClient()
    ask, submit, left = Asker(client, make_state(client)), client.submit, [after]

    def dying(*request: Any) -> None:
        if not left[0]:
            raise EngineDead("gone")
        left[0] -= 1
        submit(*request)

    client.submit = dying  # type: ignore[method-assign]
    connection = Connection(ask, path, stream=streams, n=3)
    await asyncio.wait_for(connection.task, 5)
    assert b'"engine_dead"' in connection.body
    assert connection.status == (200 if streams else 500)
    assert not ask.state.open and not client.running and ask.state.shared.queue.own == (0, 0)
    metrics = (await ask.http.get("/metrics")).text
    assert 'request_success_total{finished_reason="error",model_name="m"} 1.0' in metrics
    assert 'request_success_total{finished_reason="abort",model_name="m"} 2.0' in metrics
