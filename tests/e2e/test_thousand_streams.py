"""A thousand streams at once: none is dropped, none aborted, none mixed up with another.

The server begins with a limit of open files that is far too low for them.
"""

from __future__ import annotations

import asyncio
import json
import resource

import pytest
from served import Served, served

from tokenspeed.bench.http_client import Address, HttpClient

pytestmark = pytest.mark.long

NUM_STREAMS = 1000
NUM_TOKENS = 24


async def stream(client: HttpClient, number: int) -> list[int]:
    """The tokens of one stream, which must end in order."""
    body = {
        "prompt": [8 + number % 150, 8 + number // 150, 50],
        "max_tokens": NUM_TOKENS,
        "temperature": 1,
        "seed": number,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
    }
    data = bytearray()
    async with client.request("POST", "/v1/completions", json.dumps(body).encode()) as answer:
        assert answer.status == 200, await answer.read()
        async for block in answer.blocks:
            data += block
    *events, done, rest = data.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b""), events[-1]
    choices = [
        json.loads(event.removeprefix(b"data: "))["choices"][0]
        for event in events
        if not event.startswith(b":")
    ]
    assert choices[-1]["finish_reason"] == "length"
    return [id for choice in choices for id in choice["token_ids"]]


async def streams(server: Served, numbers: range) -> list[list[int]]:
    client = HttpClient(Address.parse(server.url), {})
    try:
        async with asyncio.timeout(300):
            return await asyncio.gather(*(stream(client, number) for number in numbers))
    finally:
        client.close()


@pytest.mark.parametrize("max_num_seqs", [64, NUM_STREAMS])
def test_a_thousand_streams(tiny_model: str, max_num_seqs: int) -> None:
    words = [tiny_model, "--skip-tokenizer-init", "--device", "cpu", "-O0", "--seed", "1"]
    words += ["--max-num-seqs", str(max_num_seqs), "--max-total-tokens", "65536"]
    with served(*words, limits={resource.RLIMIT_NOFILE: 256}) as server:
        server.wait_ready()
        found = asyncio.run(streams(server, range(NUM_STREAMS)))
        assert [len(ids) for ids in found] == [NUM_TOKENS] * NUM_STREAMS
        server.wait_idle()
        assert server.gauge("kv_cache_usage_perc") == 0
        assert server.gauge("generation_tokens_total") == NUM_STREAMS * NUM_TOKENS
        some = range(0, NUM_STREAMS, 97)
        assert [found[number] for number in some] == asyncio.run(streams(server, some))
        assert server.terminate() == 0
        assert "disconnected" not in server.log and "Traceback" not in server.log
