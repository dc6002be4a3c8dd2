"""`tokenspeed serve`, up to where the server begins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tokenspeed.cli import serve
from tokenspeed.config import Config


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Config]]:
    """The settings that the server was given; a hangup ends the process again afterwards."""
    seen: list[Config] = []

    def run(config: Config) -> int:
        os.kill(os.getpid(), signal.SIGHUP)
        seen.append(config)
        return 0

    def load(name: str) -> Any:
        return SimpleNamespace(serve=run)

    before = signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(serve.importlib, "import_module", load)
    yield seen
    signal.signal(signal.SIGHUP, before)


def test_a_hangup_while_it_starts_ends_no_server_that_reads_files_again(
    started: list[Config],
) -> None:
    assert serve.main(["smollm2", "--api-key-file", "keys"]) == 0
    assert started[0].server.api_key_file == "keys"
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_other_servers_end_with_their_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        serve.importlib, "import_module", lambda name: SimpleNamespace(serve=lambda config: 0)
    )
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is another
    try:
        assert serve.main(["smollm2"]) == 0
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)
