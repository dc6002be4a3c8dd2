"""The application over a scripted engine, asked in process."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from server_fakes import ANSWER, Asker, FakeClient, make_state


@pytest.fixture
async def ask() -> AsyncIterator[Asker]:
    client = FakeClient(ANSWER)
    asker = Asker(client, make_state(client))
    yield asker
    await asker.check_alive()
    await asker.http.aclose()
