"""Mixed traffic for a while, in rounds, and what is left of each: nothing.

    python tests/e2e/soak.py [--seconds 600] [--round 30] [--out RESULT.json]

The HTTP process is this one, the engine's and the clients' are its children. After each round all
requests must have ended; then memory, open files, tasks, threads and pages are counted. From the
second round on, files, tasks, threads and pages must be as they were, and memory must not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import uvloop
from soak_traffic import KEY

from tokenspeed.bench.machine import facts
from tokenspeed.config import Config, make_config
from tokenspeed.engine.client import EngineClient
from tokenspeed.server.listener import listen, url_of
from tokenspeed.server.run import run_server
from tokenspeed.server.siblings import Siblings

WARM_ROUNDS = 2
"""Rounds after which pools, caches and the allocator's arenas have their size."""
TEMPLATE = """{% if tools %}<|im_start|>system
<tool_call></tool_call>{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The model's own has no place for tools."""
MAX_GROWTH = 0.05
MAX_GROWTH_MB = 24.0
"""Memory may grow by either from the warm rounds to the last: a heap is never quite the same."""


def settings(template: Path) -> Config:
    template.write_text(TEMPLATE)
    return make_config(
        {
            "model": "smollm2",
            "chat_template": str(template),
            "device": "cpu",
            "level": 0,
            "max_total_tokens": 4096,  # so few that all are soon used, and some must wait
            "max_num_seqs": 12,
            "api_key": (KEY,),
            "response_store_bytes": 1 << 20,
            "log_stats_interval": 0,
        }
    )


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def sample(client: EngineClient) -> dict[str, float]:
    """What the two processes hold at this moment."""
    gc.collect()
    assert client._process is not None
    pids = {"http": os.getpid(), "engine": client._process.pid}
    found: dict[str, float] = {"tasks": len(asyncio.all_tasks()), "pages": client.stats.kv_usage}
    for name, pid in pids.items():
        found[f"{name}_mb"] = round(resident_mb(pid), 1)
        found[f"{name}_files"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        found[f"{name}_threads"] = len(list(Path(f"/proc/{pid}/task").iterdir()))
    return found


async def traffic(url: str, seconds: float, seed: int) -> dict[str, Any]:
    script = str(Path(__file__).with_name("soak_traffic.py"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, script, url, str(seconds), str(seed)), stdout=asyncio.subprocess.PIPE
    )
    told, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"the traffic of seed {seed} ended with {process.returncode}")
    found: dict[str, Any] = json.loads(told)
    return found


async def idle(client: EngineClient, usual: set[asyncio.Task[Any]]) -> None:
    """Wait until the engine has nothing to do, and all that clients left behind has ended."""
    async with asyncio.timeout(30):
        while client.stats.num_running or client.stats.num_waiting or client.stats.kv_usage:
            await asyncio.sleep(0.1)
    ends = time.monotonic() + 5
    while (left := asyncio.all_tasks() - usual) and time.monotonic() < ends:
        await asyncio.sleep(0.1)
    for task in left:
        print(f"left behind: {task!r}"[:300], file=sys.stderr, flush=True)


async def soak(seconds: float, round_s: float) -> dict[str, Any]:
    """The rounds. Raises SystemExit for an answer that is not as it should be."""
    with tempfile.TemporaryDirectory() as folder:
        config = settings(Path(folder, "template.jinja"))
        return await rounds_of(config, seconds, round_s)


async def rounds_of(config: Config, seconds: float, round_s: float) -> dict[str, Any]:
    listener = listen("127.0.0.1", 0, 60.0)
    client = EngineClient(config)
    await client.start()
    siblings = Siblings(config, client, listener)
    siblings.start()
    serving = asyncio.create_task(
        run_server(config, client, listener, siblings, began=time.monotonic()), name="server"
    )
    await client.wait_ready()
    await asyncio.sleep(1.0)
    usual = asyncio.all_tasks()
    rounds, ends = [], time.monotonic() + seconds
    while time.monotonic() < ends or len(rounds) <= WARM_ROUNDS:
        done = await traffic(url_of(listener), min(round_s, seconds), len(rounds))
        await idle(client, usual)
        rounds.append({"held": sample(client), **done})
        print(json.dumps(rounds[-1]["held"]), file=sys.stderr, flush=True)
        assert not serving.done()
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)
    return {"machine": facts(), "seconds": seconds, "rounds": rounds}


def judge(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Whether everything stayed flat. Raises AssertionError."""
    held = [each["held"] for each in rounds]
    warm, later = held[WARM_ROUNDS - 1], held[WARM_ROUNDS:]
    for name in warm.keys() - {"http_mb", "engine_mb"}:
        assert {each[name] for each in later} <= {warm[name]}, f"{name}: {warm} {later}"
    for name in ("http_mb", "engine_mb"):
        most = max(MAX_GROWTH * warm[name], MAX_GROWTH_MB)
        assert later[-1][name] - warm[name] <= most, f"{name}: {warm[name]} {later}"
    (answer,) = {text for each in rounds for text in each["answers"]}
    counts: dict[str, int] = {}
    for each in rounds:
        for name, count in each["counts"].items():
            counts[name] = counts.get(name, 0) + count
    left = counts["left"] / counts["asked"]
    assert left > 0.2, f"only {left:.0%} have left"
    return {"answer": answer, "left": left, "counts": counts, "first": warm, "last": later[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--round", type=float, default=30.0, help="seconds of each round")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(soak(args.seconds, args.round))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(judge(result["rounds"]), indent=1))


if __name__ == "__main__":
    main()
