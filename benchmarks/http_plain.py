"""The HTTP process beside a plain one, over the same played engine, in one run.

    python benchmarks/http_plain.py [--streams 256] [--output-len 128] [--paced-ms 40]
                                    [--out RESULT.json]

    ours     tokenspeed serve; the engine sends tokens for all streams as fast as it can
    plain    the same, but the server is Hypercorn on uvloop with Starlette's StreamingResponse and
             one event a token, and makes no text: its words are there already
    paced    tokenspeed serve again, with a step every `paced-ms`: slow enough for it to keep up, so
             that one token is one event, and a token's delay is its way and not a queue

Engine, link, request and reader are those of `http_side.py`. The ratio is ours over plain.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import hypercorn.asyncio
import uvloop
from http_side import Shape, play, shown
from hypercorn.config import Config as HypercornConfig
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from tokenspeed.bench.child_server import end
from tokenspeed.bench.machine import facts
from tokenspeed.config import make_config
from tokenspeed.engine.client import EngineClient
from tokenspeed.request import GenerateRequest, RequestDelta, SamplingParams
from tokenspeed.server.listener import listen
from tokenspeed.text.source import resolve_model
from tokenspeed.text.tokenizer import load_tokenizer

WANTED_RATIO = 3.0


class QueueSink:
    """A stream's deltas, for whoever waits for them."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[RequestDelta] = asyncio.Queue()

    def put(self, delta: RequestDelta) -> None:
        self.queue.put_nowait(delta)

    def fail(self, error: Exception) -> None:
        raise error


def plain_app(client: EngineClient, words: list[str]) -> Starlette:
    """One route, one event a token."""
    created = int(time.time())

    async def events(id: str, sink: QueueSink) -> AsyncIterator[str]:
        while True:
            delta = await sink.queue.get()
            for token in delta.token_ids:
                choice = {"index": 0, "delta": {"content": words[token]}, "finish_reason": None}
                event = {
                    "id": id,
                    "object": "chat.completion.chunk",
                    "created": created,
                    "model": "m",
                    "choices": [choice],
                }
                yield f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
            if delta.finish_reason is not None:
                yield "data: [DONE]\n\n"
                return

    async def chat(request: Request) -> StreamingResponse:
        asked = await request.json()
        id, sink = f"chatcmpl-{time.perf_counter_ns()}", QueueSink()
        params = SamplingParams(max_tokens=asked["max_tokens"])
        client.submit(GenerateRequest(id=id, prompt_ids=[5], params=params), sink)
        return StreamingResponse(events(id, sink), media_type="text/event-stream")

    return Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])


async def serve_plain(settings: dict[str, Any]) -> None:
    """Until the process is ended."""
    client = EngineClient(make_config(settings))
    await client.start()
    await client.wait_ready()
    tokenizer = load_tokenizer(resolve_model(settings["model"]))
    ids = range(tokenizer.vocab_size)
    words = [tokenizer.token_bytes(id).decode(errors="replace") for id in ids]
    config = HypercornConfig()
    listener = listen("127.0.0.1", 0, 60.0)
    config.bind = [f"fd://{listener.fileno()}"]
    config.backlog = 2048
    print(f"ready in 0.0 s at http://127.0.0.1:{listener.getsockname()[1]}, model plain")
    sys.stdout.flush()
    await hypercorn.asyncio.serve(plain_app(client, words), config)  # type: ignore[arg-type]


@contextlib.contextmanager
def plain_process(
    settings: Mapping[str, Any], environ: Mapping[str, str]
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", json.dumps(dict(settings))],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    assert process.stdout is not None
    try:
        with process.stdout as log:
            yield process, log
    finally:
        end(process)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--paced-ms", type=float, default=40.0)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve_plain(json.loads(args.serve)))
        return
    settings = {"model": args.model, "max_num_seqs": args.streams}
    fast = Shape(args.streams, args.output_len, 0.0)
    paced = Shape(args.streams, args.output_len, args.paced_ms)
    found: dict[str, Any] = {"machine": facts(), "settings": settings}
    found["ours"] = play(fast, settings)
    found["plain"] = play(fast, settings, plain_process)
    found["paced"] = play(paced, settings)
    found["ratio"] = found["ours"]["tokens_per_s"] / found["plain"]["tokens_per_s"]
    for name in ("ours", "plain", "paced"):
        print(f"{name:6} {shown(found[name])}")
    print(f"ratio  {found['ratio']:.1f} (wanted: {WANTED_RATIO:g})")
    if args.out:
        args.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
