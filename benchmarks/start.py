"""From `tokenspeed serve` to a server that is ready: compiled pieces out of the cache, and eager.

    python benchmarks/start.py [--rounds 5] [--model smollm2] [--cache FOLDER] [--out RESULT.json]
                               [--add]

Each start is a fresh process; the clock runs from its creation until GET /ready answers 200:

    warm     -O1 with the entry in the cache
    eager    -O0 with an empty cache folder
    imports  no server: importing torch._dynamo and torch._inductor in a process that has torch

Rounds are interleaved. Before them one start fills the cache (`--cache` keeps it for the next run)
and one of each kind warms the machine's own file cache. `--add` keeps the rounds that RESULT.json
already holds, so that a machine need be quiet for a few at a time only. A warm start may take 3 s
more than an eager one and the imports together.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from other_load import OtherLoad

from tokenspeed.bench.machine import facts

IMPORTS = """
import time, torch
began = time.perf_counter()
import torch._dynamo, torch._inductor
print(time.perf_counter() - began)
"""
ALLOWED_S = 3.0
POLL_S = 0.01
LIMIT_S = 300.0
LEVELS = {"warm": "level 1 (compile cache hit)", "eager": "level 0"}


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def is_ready(port: int) -> bool:
    with contextlib.suppress(OSError):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5.0) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError:  # it is still loading
            return False
    return False


def start(model: str, level: int, cache: Path) -> tuple[float, str]:
    """Seconds from the process's creation to readiness, and what the server said meanwhile."""
    port = free_port()
    words = ["serve", model, f"-O{level}", "--cache-dir", str(cache), "--port", str(port)]
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "tokenspeed", *words], stdout=log, stderr=log
        )
        try:
            while not is_ready(port):
                if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                    log.seek(0)
                    raise SystemExit(f"the server did not start:\n{log.read()}")
                time.sleep(POLL_S)
            seconds = time.monotonic() - began
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
        log.seek(0)
        return seconds, log.read()


def import_s() -> float:
    command = [sys.executable, "-c", IMPORTS]
    return float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def measure(kind: str, model: str, cache: Path, empty: Path) -> float:
    if kind == "imports":
        return import_s()
    seconds, log = start(model, 1, cache) if kind == "warm" else start(model, 0, empty)
    if LEVELS[kind] not in log:
        raise SystemExit(f"this was no {kind} start:\n{log}")
    return seconds


def compare(rounds: int, model: str, cache: Path, earlier: dict[str, Any]) -> dict[str, Any]:
    """The report of `rounds` rounds, and of those that the report `earlier` holds, if any."""
    kinds = [*LEVELS, "imports"]
    seconds: dict[str, list[float]] = earlier.get("seconds", {kind: [] for kind in kinds})
    loads: list[float] = earlier.get("other_cores", [])
    with tempfile.TemporaryDirectory() as empty:
        filled, _ = start(model, 1, cache)
        for number in range(rounds + 1):
            with OtherLoad() as others:
                for kind in kinds[:: -1 if number % 2 else 1]:
                    found = measure(kind, model, cache, Path(empty))
                    if number:  # the first round warms up
                        seconds[kind].append(found)
            if number:
                loads.append(others.cores)
    medians = {kind: statistics.median(found) for kind, found in seconds.items()}
    return {
        "machine": facts(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))),
        "model": model,
        "filling_start_s": filled,
        "medians_s": medians,
        "above_allowed_s": medians["warm"] - medians["eager"] - medians["imports"] - ALLOWED_S,
        "seconds": seconds,
        "other_cores": loads,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--cache", type=Path, help="a compile cache to fill, or to find filled")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--add", action="store_true", help="to the rounds that --out already has")
    args = parser.parse_args()
    if args.add and args.out is None:
        parser.error("--add needs --out")
    # Ended by a time limit, it still ends the server that it is timing.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    earlier = json.loads(args.out.read_text()) if args.add and args.out.exists() else {}
    with contextlib.ExitStack() as stack:
        cache = args.cache or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        report = compare(args.rounds, args.model, cache, earlier)
    for kind, found in report["seconds"].items():
        median = report["medians_s"][kind]
        print(f"{kind:8} {median:6.2f} s ({min(found):.2f}-{max(found):.2f})")
    above = report["above_allowed_s"]
    print(f"warm less (eager + imports + {ALLOWED_S} s): {above:+.2f} s, so it is", end=" ")
    print("missed" if above > 0 else "met", f"(others used {max(report['other_cores']):.2f} cores)")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
