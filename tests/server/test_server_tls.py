"""HTTPS: certificates good and bad, what clients must show, and renewal without a restart."""

from __future__ import annotations

import contextlib
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import FakeClient, make_state

from tokenspeed.config import make_config
from tokenspeed.options import ConfigError
from tokenspeed.server.app import create_app
from tokenspeed.server.http_server import HttpServer
from tokenspeed.server.listener import listen, url_of
from tokenspeed.server.serve import serve
from tokenspeed.server.tls import renew_certificate, tls_context
from tokenspeed.server_config import ServerConfig

DATA = Path(__file__).parent.parent / "data" / "tls"
CERT, KEY, ENCRYPTED, OTHER_KEY = (
    str(DATA / name) for name in ("cert.pem", "key.pem", "key-encrypted.pem", "other-key.pem")
)
PAIR = {"ssl_certfile": CERT, "ssl_keyfile": KEY}


def server_config(**options: Any) -> ServerConfig:
    return make_config(options).server


@contextlib.asynccontextmanager
async def serving(config: ServerConfig, context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """The URL of an application that is served so."""
    app = create_app(make_state(FakeClient()))
    listener = listen("127.0.0.1", 0, 5.0)
    url = url_of(listener, is_tls=True)
    server = HttpServer(app, listener, config, context)
    try:
        yield url
    finally:
        await server.stop()


async def ask(url: str, trusted: str = CERT, shown: tuple[str, str] | None = None) -> int:
    context = ssl.create_default_context(cafile=trusted)
    if shown is not None:
        context.load_cert_chain(*shown)
    async with httpx.AsyncClient(verify=context, timeout=5) as http:
        return (await http.get(f"{url}/health")).status_code


@pytest.mark.parametrize(
    "options",
    [PAIR, PAIR | {"ssl_keyfile": ENCRYPTED, "ssl_keyfile_password": "secret"}],
    ids=["plain key", "encrypted key"],
)
async def test_https(options: dict[str, Any]) -> None:
    config = server_config(**options)
    async with serving(config, tls_context(config)) as url:
        assert url.startswith("https://") and await ask(url) == 200
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=5) as http:  # trusts others only
                await http.get(f"{url}/health")
        with pytest.raises(httpx.HTTPError):
            async with httpx.AsyncClient(timeout=5) as http:
                await http.get(f"{url.replace('https', 'http')}/health")


@pytest.mark.parametrize(("asked", "without"), [(None, False), (2, False), (1, True), (0, True)])
async def test_certificates_of_clients(asked: int | None, without: bool) -> None:
    """The test's certificate stands for an authority, too."""
    config = server_config(**PAIR, ssl_ca_certs=CERT, ssl_cert_reqs=asked)
    async with serving(config, tls_context(config)) as url:
        assert await ask(url, shown=(CERT, KEY)) == 200
        if without:
            assert await ask(url) == 200
        else:
            with pytest.raises((httpx.HTTPError, ssl.SSLError)):
                await ask(url)


async def test_a_certificate_is_renewed_in_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = (shutil.copy(path, tmp_path) for path in (CERT, KEY))
    config = server_config(ssl_certfile=str(cert), ssl_keyfile=str(key))
    context = tls_context(config)
    assert context is not None
    async with serving(config, context) as url:
        shutil.copy(OTHER_KEY, key)
        renew_certificate(context, config)
        assert "stays as it is" in caplog.text and await ask(url) == 200
        shutil.copy(KEY, key)
        renew_certificate(context, config)
        assert await ask(url) == 200


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"ssl_keyfile": OTHER_KEY}, "key values mismatch"),
        ({"ssl_keyfile": ENCRYPTED}, "password"),
        ({"ssl_keyfile": ENCRYPTED, "ssl_keyfile_password": "wrong"}, "password"),
        ({"ssl_certfile": "/nowhere"}, "No such file"),
        ({"ssl_certfile": __file__}, "PEM"),
        ({"ssl_ca_certs": "/nowhere"}, "--ssl-ca-certs cannot be used: No such file"),
        ({"ssl_ca_certs": __file__}, "--ssl-ca-certs"),
    ],
)
def test_files_that_cannot_be_used_end_the_start(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refusal:
        serve(make_config({**PAIR, **options}))
    assert "wrong" not in str(refusal.value).replace("a wrong password", "")


@pytest.mark.parametrize(
    "options",
    [{"ssl_keyfile": KEY}, {"ssl_ca_certs": CERT}, {**PAIR, "ssl_cert_reqs": 2}],
)
def test_options_that_would_do_nothing_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="needs ssl_"):
        server_config(**options)
