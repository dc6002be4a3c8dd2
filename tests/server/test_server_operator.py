"""The operator's key: what it opens, what opens without it, and that nobody gets to see it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from server_fakes import asker, refused

from tokenspeed.cli.main import main
from tokenspeed.options import ConfigError
from tokenspeed.server import keys as keys_module
from tokenspeed.server.calls import CALLS
from tokenspeed.server.keys import Keys

ADMIN = tuple(call.path for call in CALLS if call.is_admin)
SERVERS: dict[str, dict[str, Any]] = {
    "no keys": {},
    "keys of clients": {"api_key": ("client",)},
    "the operator's alone": {"admin_api_key": ("boss", "second-boss")},
    "both": {"api_key": ("client",), "admin_api_key": ("boss", "second-boss")},
}
OPENS_ADMIN = {
    "no keys": (),
    "keys of clients": ("client",),
    "the operator's alone": ("boss", "second-boss"),
    "both": ("boss", "second-boss"),
}
OPENS_API = {
    "no keys": (None, "client", "boss", "second-boss", "bos", "wrong"),
    "keys of clients": ("client",),
    "the operator's alone": (None, "client", "boss", "second-boss", "bos", "wrong"),
    "both": ("client",),
}


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("server", SERVERS)
async def test_which_key_opens_what(server: str, header: str) -> None:
    ask = asker(**SERVERS[server])
    for key in (None, "client", "boss", "second-boss", "bos", "wrong"):
        value = f"Bearer {key}" if header == "authorization" else str(key)
        sent = {} if key is None else {header: value}
        for path in ADMIN:
            body = {"abort_all": True} if path == "/abort_request" else {}
            answer = await ask.http.post(path, json=body, headers=sent)
            if key in OPENS_ADMIN[server]:
                assert answer.status_code == 200 or "profile: a test" in answer.text
                continue
            status, code = 401, "invalid_api_key"
            if server == "no keys":
                status, code = 403, "key_required"
            elif server == "both" and key == "client":
                status, code = 403, "admin_key_required"
            assert refused(answer, status)["code"] == code
            assert "boss" not in answer.text and "client" not in answer.text
        for method, path in (("GET", "/v1/models"), ("GET", "/server_info")):
            answer = await ask.http.request(method, path, headers=sent)
            assert answer.status_code == (200 if key in OPENS_API[server] else 401), (path, key)
    await ask.http.aclose()


async def test_no_spelling_of_a_path_leads_past_the_key() -> None:
    ask = asker(**SERVERS["both"])
    ask.http.headers["authorization"] = "Bearer client"
    spellings = (
        "/flush_cache",
        "/flush%5Fcache",
        "/flush_cache%0A",
        "/flush_cache?a",
        "/%66lush_cache",
    )
    for path in spellings:
        assert refused(await ask.http.post(path, json={}), 403)["code"] == "admin_key_required"
        refused(await ask.http.get(path), 403)
    for path in ("/flush_cache/", "//flush_cache", "/FLUSH_CACHE", "/v1/../flush_cache"):
        assert (await ask.http.post(path, json={})).status_code in (403, 404, 405)
    assert not ask.engine.commands.asked
    await ask.http.aclose()


async def test_two_headers_may_carry_two_keys() -> None:
    ask = asker(**SERVERS["both"])
    headers = {"authorization": "Bearer client", "x-api-key": "boss"}
    assert (await ask.http.post("/flush_cache", json={}, headers=headers)).status_code == 200
    assert (await ask.http.get("/v1/models", headers=headers)).status_code == 200
    await ask.http.aclose()


async def test_the_operator_takes_no_place_of_a_client(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("client max_requests=1\n")
    ask = asker(api_key_file=str(path), admin_api_key=("boss",))
    ask.engine.gate.clear()
    client = {"authorization": "Bearer client"}
    held = asyncio.create_task(
        ask.http.post("/v1/completions", json={"prompt": "x"}, headers=client)
    )
    while not ask.engine.running:
        await asyncio.sleep(0.01)
    refused(await ask.http.get("/v1/models", headers=client), 429)
    both = {**client, "x-api-key": "boss"}
    answer = await ask.http.post("/abort_request", json={"abort_all": True}, headers=both)
    assert answer.json() == {"num_requests": 1}
    refused(await held, 503)
    await ask.http.aclose()


async def test_the_operator_s_key_is_told_to_nobody(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level("DEBUG", "tokenspeed")
    ask = asker(**SERVERS["both"], enable_log_requests=True)
    answers = [
        await ask.http.post("/flush_cache", json={}, headers={"authorization": f"Bearer {key}"})
        for key in ("boss", "client")
    ]
    headers = {"x-api-key": "client"}
    answers += [
        await ask.http.get(path, headers=headers)
        for path in ("/server_info", "/openapi.json", "/metrics", "/page/status")
    ]
    assert "/flush_cache 200" in caplog.text and "/flush_cache 403" in caplog.text
    words = ["--model", "./nowhere", "--admin-api-key", "boss", "--print-config=all"]
    assert main(["serve", *words]) == 0
    shown = capsys.readouterr()
    assert "# admin_api_key: 1 not shown" in shown.out
    for text in (caplog.text, shown.out, shown.err, *(answer.text for answer in answers)):
        assert "boss" not in text
    await ask.http.aclose()


async def test_a_key_of_a_client_is_none_of_the_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever has it could do both. A file that comes to hold one changes nothing."""
    monkeypatch.setattr(keys_module, "LOOK_S", 0.0)
    with pytest.raises(ConfigError, match="--admin-api-key is one of --api-key too"):
        Keys(("a", "boss"), None, ("boss",))
    path = tmp_path / "keys"
    path.write_text("# ours\nboss max_requests=2\n")
    with pytest.raises(ConfigError, match="line 2: this is the operator's key") as told:
        Keys((), str(path), ("boss",))
    assert "boss" not in str(told.value)
    path.write_text("client\n")
    keys = Keys((), str(path), ("boss",))
    path.write_text("other\nboss\n")
    assert keys.match("client") and not keys.match("other") and not keys.match("boss")
    assert "line 2: this is the operator's key" in caplog.text and "boss" not in caplog.text
