"""How the engine process begins and ends, and what is left of it: nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_reader import generate, process_id
from engine_tiny import Outcome, request, tiny_config

from tokenspeed.engine import client as client_module
from tokenspeed.engine.attached import EngineDead, EngineRefused
from tokenspeed.engine.client import EngineClient


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


async def closed_without_trace(client: EngineClient) -> None:
    await client.close()
    await client.close()  # harmless
    assert client.state == "dead"
    assert not is_alive(process_id(client))
    assert not client.folder.exists()


async def pause_takes_nothing_but_time(client: EngineClient) -> None:
    """Held in the middle, an output goes on as if nothing had been; a flush leaves no prefix."""

    async def outcome(name: str, *, holds: bool) -> Outcome:
        result, count = Outcome(), 0
        prompt = list(range(5, 69))
        async for delta in generate(client, request(name, prompt, max_tokens=60, ignore_eos=True)):
            result.push(delta)
            count += 1
            if holds and count == 5:
                await client.commands.ask("pause")
                before = client.stats.steps
                late = asyncio.create_task(anext(generate(client, request("late", [5, 6]))))
                used = cpu_ticks(process_id(client))
                await asyncio.sleep(0.4)
                assert cpu_ticks(process_id(client)) - used <= 4, "it blocks"
                assert not late.done() and client.stats.steps <= before + 1
                await client.commands.ask("continue")
                await late
        return result

    whole = await outcome("a", holds=False)
    assert (await outcome("b", holds=True)).token_ids == whole.token_ids
    hits = client.stats.prefix_hits
    assert hits > 0
    assert (await client.commands.ask("flush_cache")).num_pages > 0
    assert (await client.commands.ask("flush_cache")).num_pages == 0
    assert (await outcome("c", holds=False)).token_ids == whole.token_ids
    assert client.stats.prefix_hits == hits


async def a_profile_is_recorded(client: EngineClient, folder: Path) -> None:
    done = await client.commands.ask("start_profile", num_steps=3)
    assert done.profile is not None and Path(done.profile.path).parent == folder
    assert (await client.commands.ask("start_profile", num_steps=3)).refusal
    async for _ in generate(client, request("profiled", [5, 6], ignore_eos=True)):
        pass
    profile = (await client.commands.ask("stop_profile")).profile
    assert profile is not None and profile.num_steps == 3
    assert [str(path) for path in folder.iterdir()] == [profile.path]


async def test_idle_interrupted_and_closed(tiny_model: str, tmp_path: Path) -> None:
    """It blocks while idle, ignores Ctrl-C, answers after both, pauses, has some steps profiled,
    and goes when told.
    """
    options = {"api_key": ("secret",), "profile_dir": str(tmp_path)}
    client = EngineClient(tiny_config(tiny_model, **options))
    assert client._config.server.api_key == ()
    await client.start()
    await client.wait_ready()
    assert client.ready is not None
    assert (client.ready.max_model_len, client.ready.vocab_size) == (256, 199)
    assert client.progress is not None and client.state == "ready"
    await asyncio.sleep(1.5)  # past the check that it makes when it falls idle
    before = cpu_ticks(process_id(client))
    await asyncio.sleep(0.5)
    assert cpu_ticks(process_id(client)) - before <= 1
    os.kill(process_id(client), signal.SIGINT)
    outcome = Outcome()
    async for delta in generate(client, request("a", [5, 6])):
        outcome.push(delta)
    assert outcome.error is None
    await pause_takes_nothing_but_time(client)
    await a_profile_is_recorded(client, tmp_path)
    open_request = generate(client, request("b", [5, 6], max_tokens=200, ignore_eos=True))
    await anext(open_request)
    await closed_without_trace(client)
    with pytest.raises(EngineDead, match="closed"):
        await client.commands.ask("pause")
    with pytest.raises(EngineDead, match="closed"):
        await anext(open_request)
        await anext(open_request)


async def test_a_killed_engine_ends_every_stream(tiny_model: str) -> None:
    client = EngineClient(tiny_config(tiny_model))
    await client.start()
    deltas = generate(client, request("doomed", [5, 6], max_tokens=200, ignore_eos=True))
    await anext(deltas)
    os.kill(process_id(client), signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"SIGKILL without a word") as caught:
        async for _ in deltas:
            pass
    assert client.state == "dead" and caught.type is EngineDead
    with pytest.raises(EngineDead, match="SIGKILL"):
        await anext(generate(client, request("later", [5, 6])))
    await closed_without_trace(client)
    assert "SIGKILL" in (client.failure or ""), "the first reason stays"


async def test_an_engine_that_dies_before_its_first_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where uvloop refuses to write."""
    spawn = asyncio.create_subprocess_exec

    async def dead(*words: str, **options: int) -> asyncio.subprocess.Process:
        process = await spawn(*words, **options)
        process.kill()
        await process.wait()

        def write(data: bytes) -> None:
            raise RuntimeError("unable to perform operation on <WriteUnixTransport closed=True>")

        assert process.stdin is not None
        monkeypatch.setattr(process.stdin, "write", write)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", dead)
    client = EngineClient(tiny_config("/nowhere/at/all"))
    await client.start()
    with pytest.raises(EngineDead, match="SIGKILL without a word"):
        await client.wait_ready()
    await closed_without_trace(client)


async def test_a_start_that_fails_says_why_in_one_line() -> None:
    client = EngineClient(tiny_config("/nowhere/at/all"))
    await client.start()
    with pytest.raises(EngineRefused, match=r"^'/nowhere/at/all': no such folder"):
        await client.wait_ready()
    assert "\n" not in (client.failure or "")
    await closed_without_trace(client)


async def test_a_start_has_a_limit(tiny_model: str) -> None:
    client = EngineClient(tiny_config(tiny_model, engine_startup_timeout=1.0))
    await client.start()
    with pytest.raises(EngineDead, match=r"not ready after 1 s.*--engine-startup-timeout"):
        await client.wait_ready()
    await closed_without_trace(client)


async def test_closing_a_start(tiny_model: str) -> None:
    client = EngineClient(tiny_config(tiny_model))
    await client.start()
    began = time.monotonic()
    await closed_without_trace(client)
    assert time.monotonic() - began < 30.0


async def test_an_engine_that_hangs_is_killed(
    tiny_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "SHUTDOWN_S", 0.2)
    monkeypatch.setattr(client_module, "TERMINATE_S", 0.2)
    client = EngineClient(tiny_config(tiny_model))
    await client.start()
    await client.wait_ready()
    os.kill(process_id(client), signal.SIGSTOP)
    await closed_without_trace(client)


PARENT = """
import asyncio, sys
from tokenspeed.config import make_config
from tokenspeed.engine.client import EngineClient

async def main():
    options = dict(model=sys.argv[1], skip_tokenizer_init=True, device="cpu", max_total_tokens=64,
                   max_model_len=64)
    client = EngineClient(make_config(options))
    await client.start()
    await client.wait_ready()
    print(client._process.pid, client.folder, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_no_orphan_stays_when_the_parent_is_killed(tiny_model: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, tiny_model], stdout=subprocess.PIPE, text=True
    )
    with parent:
        assert parent.stdout is not None
        pid, folder = parent.stdout.readline().split()
        assert is_alive(int(pid))
        parent.kill()
    deadline = time.monotonic() + 30.0
    while is_alive(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(int(pid))
    assert not Path(folder).exists()
