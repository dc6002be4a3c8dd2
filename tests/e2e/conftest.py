"""A served SmolLM2, started once a session as a user starts it."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from served import Served, served


@pytest.fixture(scope="session")
def running(bundled: None) -> Iterator[Served]:
    """The server; its shutdown is part of the test."""
    with served("smollm2", "--max-total-tokens", "16384", "--max-num-seqs", "16") as running:
        running.wait_ready()
        assert running.engine_id != running.process.pid
        yield running
        assert running.terminate(20) == 0


@pytest.fixture(scope="session")
def server(running: Served) -> str:
    """Its base URL."""
    return running.url


@pytest.fixture(scope="session")
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client
