"""Many streams over HTTP beside the engine alone, and how long a token is on its way.

    python benchmarks/http_streams.py [--streams 256] [--input-len 128] [--output-len 256]
                                      [--clients 4] [--model DIR --load-format dummy]
                                      [--device cuda] [--option name=value] [--out RESULT.json]

In turn, each in processes of its own: `tokenspeed.LLM` on all prompts at once, and `tokenspeed
serve` with as many streams, sent at the same moment by some client processes. Both generate the
same number of tokens for the same prompts, after a run that is not counted.

    delivered ratio   output tokens/s over HTTP (from the first request sent until the last chunk
                      was read) over those of the engine alone (one call of generate)
    delay             for each token: from the moment the engine process puts it on its socket,
                      until a client has read the chunk that carries it. The engine's log of sends
                      is written by its own process, on the same clock; clients see token ids in
                      each chunk, so both sides count the same tokens. p50 and p99 over all tokens.

What is in a delay: the hop to the HTTP process, text and JSON, HTTP, the client's own parsing.
`client_share` is what the busiest client used of its core: near 1, the delay is the client's.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from burst import add_server_options, burst, process_share, sessions_of, settings_of, vocab_size_of

from tokenspeed import LLM
from tokenspeed.bench.answer import Record
from tokenspeed.bench.child_server import serving
from tokenspeed.bench.machine import facts
from tokenspeed.bench.offline import seconds_of
from tokenspeed.bench.workloads import prompts

HOOK = """
import sys
if "tokenspeed.engine.process" in sys.orig_argv:
    import atexit, json, os, time
    from tokenspeed.engine import link
    from tokenspeed.engine.messages import StepOutputs
    sends, send = [], link.EngineLink.send
    def logged(self, client, message):
        if isinstance(message, StepOutputs):
            now = time.perf_counter()
            sends.extend((now, d.request_id, len(d.token_ids)) for d in message.deltas)
        return send(self, client, message)
    link.EngineLink.send = logged
    def write():
        with open(os.environ["ENGINE_SENDS"], "w") as file:
            json.dump(sends, file)
    atexit.register(write)
"""
"""A sitecustomize.py that makes the engine process log when it sends which request's tokens."""


def offline_child(settings: dict[str, Any], shape: dict[str, int]) -> None:
    """This file as a child: print the seconds that the engine alone takes, as JSON."""
    llm = LLM(**settings)
    seconds = seconds_of(llm)
    ids = prompts(shape["streams"], shape["input_len"], llm.engine.ready.vocab_size)
    seconds(ids, shape["output_len"])
    whole = seconds(ids, shape["output_len"])
    print(json.dumps({"whole_s": whole, "first_s": seconds(ids, 1)}))


def offline(settings: dict[str, Any], shape: dict[str, int]) -> dict[str, float]:
    command = [sys.executable, __file__, "--offline", json.dumps([settings, shape])]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def client(url: str, ids: list[list[int]], output_len: int, barrier: Barrier, pipe: Any) -> None:
    """One client process: a run that is not counted, then the one that is."""
    sessions = sessions_of(ids, output_len)
    burst(url, sessions, barrier.wait)
    cpu, before = time.process_time(), time.perf_counter()
    began, records = burst(url, sessions, barrier.wait)
    share = process_share(before, cpu)
    pipe.send((began, msgspec.json.encode(records), share))


def served(settings: dict[str, Any], shape: dict[str, int], num_clients: int) -> dict[str, Any]:
    """The streams' records with absolute times, the engine's sends, the clients' shares."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_clients)
    ids = prompts(shape["streams"], shape["input_len"], vocab_size_of(settings["model"]))
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK)
        log = Path(folder, "sends.json")
        path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
        with serving(settings, {"PYTHONPATH": path, "ENGINE_SENDS": str(log)}) as url:
            pipes = []
            for number in range(num_clients):
                mine, theirs = context.Pipe(duplex=False)
                part = ids[number::num_clients]
                words = (url, part, shape["output_len"], barrier, theirs)
                context.Process(target=client, args=words, daemon=True).start()
                theirs.close()
                pipes.append(mine)
            answers = [pipe.recv() for pipe in pipes]
        sends = json.loads(log.read_text())
    records = [
        (began, record)
        for began, encoded, _ in answers
        for record in msgspec.json.decode(encoded, type=list[Record])
    ]
    return {"records": records, "sends": sends, "share": max(each[2] for each in answers)}


def delays_ms(records: list[tuple[float, Record]], sends: list[Any]) -> np.ndarray:
    """Of every token, from the engine's send to the client's read."""
    sent: dict[str, list[float]] = defaultdict(list)
    for at, request_id, count in sends:
        sent[request_id] += [at] * count
    found = []
    for began, record in records:
        times = sent[f"{record.response_id}-0"]
        if len(times) != sum(record.chunk_tokens):
            raise SystemExit(f"{record.response_id}: the engine sent {len(times)} tokens")
        read = np.repeat(np.add(began + record.start, record.chunk_times), record.chunk_tokens)
        found.append(1e3 * (read - np.array(times)))
    return np.concatenate(found)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    settings = settings_of(args) | {"max_num_seqs": args.streams, "enable_prefix_caching": False}
    shape = {name: getattr(args, name) for name in ("streams", "input_len", "output_len")}
    alone = offline(settings, shape)
    over_http = served(settings, shape, args.clients)
    records = over_http["records"]
    first = min(began + record.start for began, record in records)
    last = max(began + record.start + record.latency for began, record in records)
    tokens = args.streams * args.output_len
    delays = delays_ms(records, over_http["sends"])
    return {
        "machine": facts(),
        "settings": settings,
        **shape,
        "clients": args.clients,
        "offline_tokens_per_s": tokens / alone["whole_s"],
        "http_tokens_per_s": tokens / (last - first),
        "delivered_ratio": alone["whole_s"] / (last - first),
        "delay_ms": {f"p{p}": float(np.percentile(delays, p)) for p in (50, 90, 99, 100)},
        "tokens_per_chunk": tokens / sum(len(record.chunk_times) for _, record in records),
        "mean_ttft_ms": 1e3 * float(np.mean([record.ttft for _, record in records])),
        "client_share": over_http["share"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_server_options(parser)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--clients", type=int, default=min(4, os.cpu_count() or 1))
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline_child(*json.loads(args.offline))
        return
    report = compare(args)
    print(
        f"{args.streams} streams: {report['http_tokens_per_s']:.0f} of "
        f"{report['offline_tokens_per_s']:.0f} tokens/s delivered "
        f"({report['delivered_ratio']:.3f}); delay p50 {report['delay_ms']['p50']:.1f} ms, p99 "
        f"{report['delay_ms']['p99']:.1f} ms; {report['tokens_per_chunk']:.2f} tokens a chunk; "
        f"clients used up to {report['client_share']:.2f} cores"
    )
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
