"""Batch lines for every API: named by the help, answered and refused as over HTTP."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from server_fakes import CHAT, COMPLETIONS, Asker, FakeClient, make_state
from test_server_batch import read, run, write

from tokenspeed.cli import batch as cli_batch
from tokenspeed.server.api import APIS
from tokenspeed.server.batch_progress import BatchCounts


def test_the_help_names_every_api() -> None:
    assert not [path for path in APIS if not re.search(rf"{path}(?![/\w])", cli_batch._HEAD)]


BODIES: dict[str, Any] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}]},
    COMPLETIONS: {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 9},
}


@pytest.mark.parametrize("url", APIS)
async def test_lines_of_every_api_are_answered_as_it_answers(tmp_path: Path, url: str) -> None:
    """Answers and errors have the shape that the same body gets over HTTP."""
    client = FakeClient()
    state = make_state(client)
    ask = Asker(client, state)
    bodies = [BODIES[url], BODIES[url] | {"temperature": 9}, BODIES[url] | {"model": "gpt-9"}]
    lines = [
        {"custom_id": str(number), "method": "POST", "url": url, "body": body}
        for number, body in enumerate(bodies)
    ]
    out = tmp_path / "out.jsonl"
    counts = await run(state, write(tmp_path / "in.jsonl", lines), str(out), concurrency=1)
    assert counts == BatchCounts(completed=1, failed=2)
    for line, body in zip(read(out), bodies, strict=True):
        told = await ask.http.post(url, json=body)
        assert line["response"]["status_code"] == told.status_code
        assert line["response"]["body"].keys() == told.json().keys()
        if told.status_code != 200:
            assert line["response"]["body"] == told.json()
    await ask.http.aclose()
