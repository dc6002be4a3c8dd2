"""What the HTTP side can carry, without a model: a played engine, the real server, a light reader.

    python benchmarks/http_side.py [--streams 256] [--output-len 256] [--step-ms 11.3]
                                   [--api-processes 1 2] [--option name=value] [--profile FILE]
                                   [--out RESULT.json]

The engine process is replaced by one without torch, which waits until all streams are there and
then sends a token for each of them every `step-ms` over the real link (0: as fast as it can). One
client process reads all streams and only notes what came when; it takes them apart at the end.
For each number of `--api-processes` there is a run of its own.

    tokens/s     delivered, from the first step until the last chunk was read
    cpu/token    CPU time of the HTTP processes, a token, in us, while tokens come; not told where
                 most came before all streams had begun
    http load    that time, a step of all streams, as a share of the step: below their number, or
                 they fall behind
    delay        for each token: from the step's send to the client's read of its chunk, p50 and p99
    per event    tokens in an event while tokens come: 1, unless it falls behind

A token is four characters, so that a reader can count them. `--profile` writes cProfile's stats of
the first HTTP process, whose own cost then counts.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import itertools
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

import numpy as np
from burst import typed

from tokenspeed.bench.child_server import server_process
from tokenspeed.bench.machine import facts
from tokenspeed.engine.child import end_with_parent, read_orders
from tokenspeed.engine.link import EngineLink
from tokenspeed.engine.messages import (
    Abort,
    Launch,
    Ready,
    Shutdown,
    Stats,
    StepOutputs,
    Submit,
)
from tokenspeed.request import FinishReason, RequestDelta
from tokenspeed.text.source import resolve_model
from tokenspeed.text.tokenizer import load_tokenizer

TOKEN_CHARS = 4
SETTLE_S = 0.5
"""From the last request to the first step: heads of answers are no tokens."""
MAX_MODEL_LEN = 1 << 20
HOOK = """
import os, sys
if "tokenspeed.engine.process" in sys.orig_argv:
    sys.path.insert(0, os.environ["PLAYED_ENGINE"])
    import http_side
    http_side.play_engine(int(os.environ["STREAMS"]), float(os.environ["STEP_S"]))
    os._exit(0)
elif "serve" in sys.orig_argv and os.environ.get("HTTP_PROFILE"):
    import atexit, cProfile
    profile = cProfile.Profile()
    profile.enable()
    atexit.register(lambda: (profile.disable(), profile.dump_stats(os.environ["HTTP_PROFILE"])))
"""
"""A sitecustomize.py that plays the engine in its process."""

_SHOWN = re.compile(rb'"(?:content|text)":"([^"]+)"')
_READY = re.compile(r"ready in [\d.]+ s at (http://\S+), model ")


def play_engine(num_streams: int, step_s: float) -> None:
    """The engine's process: rounds of `num_streams` requests, one token each a step. The moments of
    the last round's steps go to the file that STEP_TIMES names.
    """
    launch = read_orders(Launch)
    end_with_parent(lambda: None)
    tokenizer = load_tokenizer(resolve_model(launch.config.model.model))
    words = (id for id in range(tokenizer.vocab_size) if _is_word(tokenizer.token_bytes(id)))
    ids = list(itertools.islice(words, 1000))
    link = EngineLink(launch.address)
    link.wait_for_client()
    link.announce(
        Ready(
            max_model_len=MAX_MODEL_LEN,
            vocab_size=tokenizer.vocab_size,
            num_pages=1,
            block_size=16,
            kv_cache_dtype="float32",
            seconds=0.0,
            settings=launch.config,
            reasons={},
        )
    )
    owners: dict[str, bytes] = {}
    limits: dict[str, int] = {}
    while True:
        for client, message in link.receive(None):
            if isinstance(message, Shutdown):
                link.close()
                return
            if isinstance(message, Submit):
                owners[message.request.id] = client
                limits[message.request.id] = message.request.params.max_tokens or 1
            elif isinstance(message, Abort):
                raise SystemExit("a request was aborted")
        if len(owners) == num_streams:
            _play_round(link, owners, limits, ids, step_s)
            owners, limits = {}, {}


def _is_word(data: bytes) -> bool:
    return len(data) == TOKEN_CHARS and data.lstrip(b" ").isalnum()


def _play_round(
    link: EngineLink,
    owners: dict[str, bytes],
    limits: dict[str, int],
    ids: list[int],
    step_s: float,
) -> None:
    num_steps = max(limits.values())
    times = []
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    for step in range(num_steps):
        time.sleep(max(0.0, began + step * step_s - time.perf_counter()))
        outboxes: dict[bytes, list[RequestDelta]] = {client: [] for client in link.clients}
        for row, (request_id, client) in enumerate(owners.items()):
            reason = FinishReason.LENGTH if step == limits[request_id] - 1 else None
            token = ids[(7 * row + step) % len(ids)]
            delta = RequestDelta(request_id=request_id, token_ids=[token], finish_reason=reason)
            outboxes[client].append(delta)
        times.append(time.perf_counter())
        for client, deltas in outboxes.items():
            link.send(client, StepOutputs(deltas, Stats(steps=step, num_running=len(owners))))
    Path(os.environ["STEP_TIMES"]).write_text(json.dumps(times))


@dataclass
class Reading:
    """What one stream has received: when, and up to which byte."""

    data: bytearray = field(default_factory=bytearray)
    times: list[float] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)

    @property
    def num_events(self) -> int:
        """Events that show something."""
        return len(_SHOWN.findall(self.data))

    def tokens(self) -> list[float]:
        """The moment at which each token was read."""
        found = []
        for event in _SHOWN.finditer(self.data):
            at = self.times[bisect.bisect_left(self.ends, event.end())]
            found += [at] * (len(event[1]) // TOKEN_CHARS)
        return found


def read_streams(url: str, num_streams: int, body: bytes, pids: list[int]) -> dict[str, Any]:
    """One round. CPU times are those of the processes `pids`, from the moment at which all streams
    have begun.
    """
    address = urlsplit(url)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    selector = selectors.DefaultSelector()
    for _ in range(num_streams):
        connection = socket.create_connection((address.hostname, address.port))
        connection.sendall(head.encode() + body)
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ, Reading())
    readings = [key.data for key in selector.get_map().values()]
    waiting, cpu, skipped, num_events = num_streams, cpu_s(pids), 0, 0
    while selector.get_map():
        for key, _ in selector.select():
            reading: Reading = key.data
            data = key.fileobj.recv(1 << 18)  # type: ignore[union-attr]
            reading.data += data
            reading.times.append(time.perf_counter())
            reading.ends.append(len(reading.data))
            if waiting and b'"content":"' in data and len(reading.ends) > 1:
                waiting -= 1
                if waiting == 0:
                    cpu = cpu_s(pids)
                    skipped = sum(len(each.tokens()) for each in readings)
                    num_events = sum(each.num_events for each in readings)
            if not data or reading.data.endswith(b"0\r\n\r\n"):
                selector.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
    times = [reading.tokens() for reading in readings]
    total = sum(map(len, times))
    all_events = sum(each.num_events for each in readings)
    if 2 * skipped > total:
        return {"times": times, "cpu_s": None, "per_event": total / all_events}
    counted = total - skipped
    return {
        "times": times,
        "cpu_s": (cpu_s(pids) - cpu) / counted,
        "per_event": counted / (all_events - num_events),
    }


def cpu_s(pids: list[int]) -> float:
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def http_processes(pid: int) -> list[int]:
    """The server and those of its children that are not the engine."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    engine = b"tokenspeed.engine.process"
    return [
        pid,
        *(
            int(each)
            for each in children
            if engine not in Path(f"/proc/{each}/cmdline").read_bytes()
        ),
    ]


@dataclass(frozen=True)
class Shape:
    """What is played: streams, tokens of each, and milliseconds between two steps."""

    streams: int
    output_len: int
    step_ms: float


Start = Callable[
    [Mapping[str, Any], Mapping[str, str]],
    contextlib.AbstractContextManager[tuple[subprocess.Popen[str], IO[str]]],
]
"""Starts a server with settings and an environment; its process and its log."""


def play(
    shape: Shape, settings: Mapping[str, Any], start: Start = server_process, profile: str = ""
) -> dict[str, Any]:
    """The second of two rounds against a server over a played engine."""
    body = json.dumps(
        {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "max_tokens": shape.output_len,
            "stream": True,
        }
    ).encode()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(HOOK)
        times_file = Path(folder, "times.json")
        environ = {
            "PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]),
            "PLAYED_ENGINE": str(Path(__file__).parent),
            "STREAMS": str(shape.streams),
            "STEP_S": str(shape.step_ms / 1e3),
            "STEP_TIMES": str(times_file),
            "HTTP_PROFILE": profile,
        }
        with start(settings, environ) as (process, log):
            found = None
            for line in log:
                found = _READY.search(line)
                if found:
                    break
                print(line, end="", file=sys.stderr)
            assert found is not None, "the server did not get ready"
            pids = http_processes(process.pid)
            read_streams(found[1], shape.streams, body, pids)
            read = read_streams(found[1], shape.streams, body, pids)
            steps = np.array(json.loads(times_file.read_text()))
    delays = np.concatenate([1e3 * (np.array(times) - steps) for times in read["times"]])
    seconds = max(times[-1] for times in read["times"]) - steps[0]
    tokens, cpu = shape.streams * shape.output_len, read["cpu_s"]
    return {
        **asdict(shape),
        "tokens_per_s": tokens / seconds,
        "played_tokens_per_s": tokens / (steps[-1] - steps[0]),
        "cpu_us_per_token": None if cpu is None else 1e6 * cpu,
        "http_load": None if cpu is None else cpu * tokens / (steps[-1] - steps[0]),
        "tokens_per_event": read["per_event"],
        "delay_ms": {f"p{p}": float(np.percentile(delays, p)) for p in (50, 90, 99, 100)},
    }


def shown(report: Mapping[str, Any]) -> str:
    """A report on one line."""
    delay, cpu = report["delay_ms"], report["cpu_us_per_token"]
    used = "" if cpu is None else f"{cpu:.1f} us CPU a token, load {report['http_load']:.2f}; "
    return (
        f"{report['streams']} streams, a step every {report['step_ms']:g} ms: "
        f"{report['tokens_per_s']:.0f} of {report['played_tokens_per_s']:.0f} tokens/s, "
        f"{report['tokens_per_event']:.2f} an event; {used}delay p50 {delay['p50']:.1f} ms, "
        f"p99 {delay['p99']:.1f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="whose tokenizer and template are used")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=11.3)
    parser.add_argument("--api-processes", type=int, nargs="+", default=[1])
    parser.add_argument("--option", action="append", default=[], help="name=value of serve")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    settings: dict[str, Any] = {"model": args.model, "max_num_seqs": args.streams}
    settings |= {name: typed(value) for name, value in (o.split("=", 1) for o in args.option)}
    shape = Shape(args.streams, args.output_len, args.step_ms)
    reports = []
    for num_processes in args.api_processes:
        own = settings | {"api_processes": num_processes}
        report = play(shape, own, profile=str(args.profile or ""))
        print(f"{num_processes} HTTP, {shown(report)}", flush=True)
        reports.append({"machine": facts(), "settings": own, **report})
    if args.out:
        args.out.write_text(json.dumps(reports, indent=1) + "\n")


if __name__ == "__main__":
    main()
