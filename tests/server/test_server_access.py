"""Who may call the API: keys from a file, and scripts of web pages."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from server_fakes import CHAT, Asker, asker, refused

from tokenspeed.config import make_config
from tokenspeed.options import ConfigError
from tokenspeed.server import keys as keys_module
from tokenspeed.server.client_address import TrustedProxies
from tokenspeed.server.keys import Keys
from tokenspeed.server.lifecycle import Signals
from tokenspeed.server.serve import serve


async def status(ask: Asker, key: str, name: str = "authorization") -> int:
    value = f"Bearer {key}" if name == "authorization" else key
    return (await ask.http.get("/v1/models", headers={name: value})).status_code


async def test_keys_of_a_file_are_read_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    caplog.set_level("INFO", "tokenspeed")
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n\n  second  \n")
    ask = asker(api_key=("given",), api_key_file=str(path))
    asked = [await status(ask, key) for key in ("given", "first", "second", "# ours", "", "third")]
    assert asked == [200] * 3 + [401] * 3
    assert await status(ask, "first", "x-api-key") == 200
    assert await status(ask, "third", "x-api-key") == 401
    path.write_text("third-key # theirs\n")
    asked = [await status(ask, key) for key in ("given", "first", "third-key")]
    assert asked == [200, 401, 200]
    for bad in ("", "# nothing\n", "x" * (keys_module.MAX_KEY_FILE_BYTES + 1)):
        path.write_text(bad)
        assert await status(ask, "third-key") == 200 and await status(ask, "") == 401
    path.unlink()
    assert await status(ask, "third-key") == 200
    refused(await ask.http.get("/v1/models"), 401)
    assert "third" not in caplog.text and "stay as they are" in caplog.text


async def test_a_change_shows_whatever_size_and_time_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    caplog.set_level("INFO", "tokenspeed")
    path = tmp_path / "keys"
    path.write_text("first\n")
    os.utime(path, (1, 1))
    keys = Keys((), str(path))
    for text, match in (("third\n", "third"), ("\n\n\n\n\n\n", "third"), ("fifth\n", "fifth")):
        path.write_text(text)
        os.utime(path, (1, 1))
        assert [each for each in ("first", "third", "fifth") if keys.match(each)] == [match]
    said = [record.message for record in caplog.records]
    assert len(said) == 3, "what has not changed is not told again"


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
async def test_a_key_file_that_is_no_file_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("first\n")
    keys = Keys((), str(path))
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    assert keys.match("first")
    with pytest.raises(ConfigError, match=rf"--api-key-file {re.escape(str(path))} (must|cannot)"):
        Keys((), str(path))


async def test_a_hangup_reads_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("first\n")
    keys = Keys((), str(path))
    before = signal.getsignal(signal.SIGHUP)
    with Signals(on_hangup=keys.reload).installed():
        path.write_text("second\n")
        assert keys.match("first")  # not looked at again yet
        os.kill(os.getpid(), signal.SIGHUP)
        await asyncio.sleep(0.05)
        assert keys.match("second") and not keys.match("first")
    assert signal.getsignal(signal.SIGHUP) == before


async def test_a_key_has_no_more_requests_at_once_than_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole answers, streams and looks; those of other keys are served, and the place is free again
    however a request ends.
    """
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    path = tmp_path / "keys"
    path.write_text("two-words  max_requests=2\nfree\n# note max_requests=1\n")
    ask = asker(api_key=("given",), api_key_file=str(path))
    ask.engine.gate.clear()
    ask.http.headers["authorization"] = "Bearer two-words"
    held = [asyncio.create_task(ask.chat(stream=streams)) for streams in (False, True)]
    while len(ask.engine.running) < 2:
        await asyncio.sleep(0.01)
    for look in (ask.http.get("/v1/models"), ask.chat(), ask.completion(stream=True)):
        answer = await look
        error = refused(answer, 429)
        assert error["code"] == "rate_limit_exceeded" and answer.headers["retry-after"] == "1"
        assert "2 are taken at once" in error["message"] and "two" not in error["message"]
    told = await ask.http.post("/v1/messages", json={})
    assert told.status_code == 429 and told.json()["error"]["type"] == "rate_limit_error"
    assert [await status(ask, key) for key in ("free", "given", "two-words", "two")] == [
        *(200, 200, 429, 401)
    ]
    assert (await ask.http.get("/health")).status_code == 200
    path.write_text("two-words max_requests=3\n")
    assert await status(ask, "two-words") == 200, "a higher limit holds at once"
    path.write_text("two-words max_requests=2\n")
    held[0].cancel()
    await asyncio.wait(held[:1])
    assert await status(ask, "two-words") == 200
    for _ in range(3):
        refused(await ask.chat(temperature=9))
    ask.engine.gate.set()
    assert (await held[1]).status_code == 200
    assert ask.state.shared.places.num_held == 0
    await ask.check_alive()
    await ask.http.aclose()


async def test_a_request_is_one_whatever_it_asks_and_from_its_headers_on(tmp_path: Path) -> None:
    """Many choices of many prompts are one; one whose body is on its way is one as well."""
    path = tmp_path / "keys"
    path.write_text("limited max_requests=2\n")
    ask = asker(api_key_file=str(path))
    ask.http.headers["authorization"] = "Bearer limited"
    ask.engine.gate.clear()
    many = asyncio.create_task(ask.completion(prompt=["a", "b", "c"], n=3))
    while len(ask.engine.running) < 9:
        await asyncio.sleep(0.01)
    assert await status(ask, "limited") == 200
    goes_on = asyncio.Event()

    async def trickled() -> AsyncIterator[bytes]:
        yield b'{"prompt": '
        await goes_on.wait()
        yield b'"x"}'

    slow = asyncio.create_task(ask.http.post("/v1/completions", content=trickled()))
    while ask.state.num_active < 2:
        await asyncio.sleep(0.01)
    assert await status(ask, "limited") == 429
    goes_on.set()
    ask.engine.gate.set()
    assert [(await each).status_code for each in (many, slow)] == [200, 200]
    assert ask.state.shared.places.num_held == 0
    await ask.http.aclose()


@pytest.mark.parametrize("limit", ["0", "-1", "1.5", "x", "", "1048577", "9" * 5000, "\u0661"])
def test_a_limit_of_a_key_is_bounded(tmp_path: Path, limit: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine max_requests=1048576\ns3cret max_requests={limit}\n")
    with pytest.raises(ConfigError, match="line 2: max_requests must be from 1 to 1048576") as told:
        Keys((), str(path))
    assert "s3cret" not in str(told.value)


@pytest.mark.parametrize(
    "rest", ["nonsense=1", "max_requests=1 max_requests=2", "two", "max_requests"]
)
def test_a_line_that_is_not_understood_is_no_key(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "keys"
    path.write_text(f"fine\ns3cret {rest}\n")
    with pytest.raises(ConfigError, match="line 2: a key is one word") as told:
        Keys((), str(path))
    assert "s3cret" not in str(told.value)


def test_a_key_file_of_another_encoding(tmp_path: Path) -> None:
    """A mark of UTF-8 is no part of a key; what no header can carry is no key."""
    path = tmp_path / "keys"
    path.write_bytes(b"\xef\xbb\xbfs3cret\n")
    assert Keys((), str(path)).match("s3cret") is not None
    for data in ("s3cret\n".encode("utf-16"), b"fine\ns3\x0bcret\n", b"s3cret\0\n"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="no control characters") as told:
            Keys((), str(path))
        assert "s3" not in str(told.value)


def test_a_key_file_that_gives_none_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n# none\n")
    for name in ("missing", "empty", ""):
        path = tmp_path / name if name else tmp_path
        with pytest.raises(ConfigError, match="--api-key-file"):
            serve(make_config({"api_key_file": str(path)}))


PAGE = {"origin": "https://page.example"}
ASKS = {
    **PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_pages_may_call_where_they_are_named() -> None:
    ask = asker(allowed_origins=("https://page.example",), api_key=("k",))
    preflight = await ask.http.options(CHAT, headers=ASKS)
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == "https://page.example"
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    for headers, expected in (({}, 401), ({"authorization": "Bearer k"}, 404)):
        answer = await ask.http.get("/nothing", headers=PAGE | headers)
        refused(answer, expected)  # errors can be read too
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    other = {**ASKS, "origin": "https://other.example"}
    assert (await ask.http.options(CHAT, headers=other)).status_code == 400
    answer = await ask.http.get("/health", headers={"origin": "https://other.example"})
    assert "access-control-allow-origin" not in answer.headers


async def test_no_page_may_call_unless_one_is_named() -> None:
    ask = asker()
    refused(await ask.http.options(CHAT, headers=ASKS), 405)
    assert (
        "access-control-allow-origin" not in (await ask.http.get("/health", headers=PAGE)).headers
    )
    limited = asker(allowed_origins=("*",), allowed_methods=("GET",), allowed_headers=("x-a",))
    assert (await limited.http.options(CHAT, headers=ASKS)).status_code == 400
    for name, value in (("allowed_methods", ("GET",)), ("allow_credentials", True)):
        with pytest.raises(ConfigError, match="allowed_origins"):
            make_config({name: value})


FORWARDED: list[tuple[tuple[str, ...], str, list[str], str]] = [
    ((), "9.9.9.9", ["1.1.1.1"], "9.9.9.9"),
    (("10.0.0.0/8",), "9.9.9.9", ["1.1.1.1"], "9.9.9.9"),  # not from a proxy
    (("10.0.0.0/8",), "10.0.0.1", [], "10.0.0.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["1.1.1.1"], "1.1.1.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6, 1.1.1.1, 10.0.0.2"], "1.1.1.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6", "1.1.1.1", "10.0.0.2"], "1.1.1.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["6.6.6.6, nonsense"], "10.0.0.1"),
    (("10.0.0.0/8",), "10.0.0.1", ["a\nb"], "10.0.0.1"),
    (("::1", "fd00::/8"), "::1", ["2001:db8::5"], "2001:db8::5"),
    (("0.0.0.0/0",), "10.0.0.1", [", ".join(["10.0.0.9"] * 99)], "10.0.0.9"),
    (("10.0.0.1",), "-", ["1.1.1.1"], "-"),
]


@pytest.mark.parametrize(("proxies", "peer", "sent", "client"), FORWARDED)
def test_the_word_of_proxies(
    proxies: tuple[str, ...], peer: str, sent: list[str], client: str
) -> None:
    config = make_config({"forwarded_allow_ips": proxies}).server
    headers = [(b"X-Forwarded-For", line.encode()) for line in sent]
    scope = {"client": None if peer == "-" else (peer, 1), "headers": headers}
    assert TrustedProxies(config.forwarded_allow_ips).client_of(scope) == client


async def test_the_request_log_names_the_client(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tokenspeed")
    ask = asker(enable_log_requests=True, forwarded_allow_ips=("127.0.0.1",), api_key=("secret",))
    headers = {"x-forwarded-for": "1.1.1.1", "authorization": "Bearer secret", "x-request-id": "r7"}
    await ask.http.get("/v1/models?key=secret", headers=headers)
    (line,) = [record.message for record in caplog.records if "r7" in record.message]
    assert line.startswith("1.1.1.1 GET /v1/models 200 ") and "secret" not in caplog.text
    with pytest.raises(ConfigError, match="forwarded_allow_ips"):
        make_config({"forwarded_allow_ips": ("proxy.example",)})


async def test_the_request_log_names_the_route_of_what_is_refused_and_leaves_probes_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A route as it is declared: the id of a stored answer is as good as a key to it."""
    caplog.set_level("INFO", "tokenspeed")
    ask = asker(enable_log_requests=True, api_key=("secret",))
    for path in ("/v1/models?key=sesame", "/v1/responses/resp_sesame", "/sesame"):
        refused(await ask.http.get(path), 401)
    ask.engine.state = "loading"
    assert [(await ask.http.get(path)).status_code for path in ("/ready", "/health")] == [503, 200]
    lines = [" ".join(record.message.split()[1:4]) for record in caplog.records]
    assert lines == [
        "GET /v1/models 401",
        "GET /v1/responses/{id} 401",
        "GET unmatched 401",
    ]
    assert "sesame" not in caplog.text
    assert 'path="/v1/models",status="401"' in (await ask.http.get("/metrics")).text
    caplog.set_level("DEBUG", "tokenspeed")
    await ask.http.get("/ready")
    assert "GET /ready 503" in caplog.text
