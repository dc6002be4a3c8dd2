"""Requests that are sent to a served model at once, and the options of the server they go to."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import uvloop

from tokenspeed.bench.answer import Record
from tokenspeed.bench.dataset import Session, one_request
from tokenspeed.bench.http_client import Address, HttpClient
from tokenspeed.bench.load import Load, Requests, limit_of
from tokenspeed.bench.serve import first_model
from tokenspeed.text.source import resolve_model

REQUEST_S = 1800.0


def add_server_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2", help="a folder (config.json is enough for "
                        "--load-format dummy), GGUF file or hub id")  # fmt: skip
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--option", action="append", default=[], help="name=value of serve")
    parser.add_argument("--out", type=Path, help="write the result here, as JSON")


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """Options of the server by name. A folder without a tokenizer is served without one."""
    settings: dict[str, Any] = {
        "model": args.model,
        "device": args.device,
        "load_format": args.load_format,
    }
    folder = Path(args.model)
    if (folder / "config.json").exists() and not (folder / "tokenizer.json").exists():
        settings["skip_tokenizer_init"] = True
    for name, value in (each.split("=", 1) for each in args.option):
        settings[name] = typed(value)
    return settings


def typed(value: str) -> Any:
    """An option's value as it was meant."""
    truth = {"true": True, "false": False}.get(value)
    return truth if truth is not None else int(value) if value.isdigit() else value


def vocab_size_of(model: str) -> int:
    """Token ids of a model are below this."""
    config = resolve_model(model, need_weights=False).config
    return int(config.get("text_config", config)["vocab_size"])


def sessions_of(prompts: Sequence[list[int]], max_tokens: int) -> list[Session]:
    return [one_request(prompt, len(prompt), max_tokens) for prompt in prompts]


def burst(
    url: str, sessions: Sequence[Session], ready: Callable[[], object] = lambda: None
) -> tuple[float, list[Record]]:
    """Send all at once, greedy, end of sequence ignored. (time.perf_counter() of the beginning,
    records by session.) `ready` is called just before: a barrier of several processes, say. Raises
    SystemExit for a request that fails.
    """
    return uvloop.run(_burst(url, sessions, ready))


async def _burst(
    url: str, sessions: Sequence[Session], ready: Callable[[], object]
) -> tuple[float, list[Record]]:
    client = HttpClient(Address.parse(url), {})
    requests = Requests(
        endpoint="/v1/completions",
        is_chat=False,
        model=await _model(client),
        fields={"temperature": 0, "ignore_eos": True, "return_token_ids": True},
        must_be_full=True,
        timeout_s=REQUEST_S,
    )
    load = Load(client, requests, limit_of(None))
    await asyncio.to_thread(ready)
    await load.run(sessions, [0.0] * len(sessions))
    client.close()
    for record in load.records:
        if record.failure is not None:
            raise SystemExit(f"a request failed: {record.failure}: {record.detail}")
    return load.began, sorted(load.records, key=lambda record: record.session)


async def _model(client: HttpClient) -> str:
    async with client.request("GET", "/v1/models") as response:
        return first_model(await response.read())


def process_share(began: float, cpu: float) -> float:
    """Of one core, that this process used since `began` (perf_counter) and `cpu` (process_time)."""
    return (time.process_time() - cpu) / max(time.perf_counter() - began, 1e-9)
