"""`tokenspeed bench latency` and `bench throughput`: read the settings, then hand over."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenspeed.bench.workloads import Workload, latency_workloads, throughput_workloads
from tokenspeed.cli import pages
from tokenspeed.cli.bench_startup import given_settings
from tokenspeed.cli.flags import Command
from tokenspeed.cli.print_config import print_settled
from tokenspeed.cli.settings import COMMON, resolve
from tokenspeed.cli.values import from_words
from tokenspeed.config import OPTIONS
from tokenspeed.log import setup_logging
from tokenspeed.options import ConfigError, Option, Settings, option, options_of
from tokenspeed.peers.answers import Takes
from tokenspeed.peers.table import TABLE
from tokenspeed.server_config import ServerConfig

_RUNNER = "tokenspeed.bench.offline"
"""Imported when it is needed: help does not wait for it, nor does it fail where that does."""

MAX_LEN = 1 << 24


@dataclass(frozen=True, kw_only=True)
class LatencyOptions(Settings):
    """What is timed."""

    batch_size: tuple[int, ...] = option(
        (), "requests in a step (default: 1 8 64 256)", low=1, high=4096
    )
    input_len: int = option(128, "prompt tokens of each", low=1, high=MAX_LEN)
    output_len: int = option(128, "steps timed after the first token", low=1, high=MAX_LEN)
    ttft_len: tuple[int, ...] = option(
        (), "prompts timed to their first token (default: 128 8192)", low=1, high=MAX_LEN
    )
    num_iters: int = option(3, "runs, of which the median counts", low=1, high=1000)

    def workloads(self) -> list[Workload]:
        return latency_workloads(
            self.batch_size or (1, 8, 64, 256),
            self.input_len,
            self.output_len,
            self.ttft_len or (128, 8192),
        )


@dataclass(frozen=True, kw_only=True)
class ThroughputOptions(Settings):
    """What is timed."""

    prefill_prompts: int = option(32, "prompts without answers", low=1, high=1 << 20)
    prefill_len: int = option(4096, "tokens of each", low=1, high=MAX_LEN)
    num_prompts: int = option(256, "requests with answers", low=1, high=1 << 20)
    input_len: int = option(1024, "prompt tokens of each", low=1, high=MAX_LEN)
    output_len: int = option(256, "output tokens of each", low=2, high=MAX_LEN)
    num_iters: int = option(3, "runs, of which the median counts", low=1, high=1000)

    def workloads(self) -> list[Workload]:
        return throughput_workloads(
            self.prefill_prompts,
            self.prefill_len,
            self.num_prompts,
            self.input_len,
            self.output_len,
        )


_KINDS: dict[str, type[LatencyOptions | ThroughputOptions]] = {
    "latency": LatencyOptions,
    "throughput": ThroughputOptions,
}

_HEADS = {
    "latency": """
usage: tokenspeed bench latency [MODEL] [options]

Time the engine in this process, without a server: a decode step at each batch size, as (time for
n + 1 tokens - time for 1) / n; and the first token of one prompt. Prompts are random ids; no prefix
is reused. The other options are those of serve.

Examples
  tokenspeed bench latency ./folder
  tokenspeed bench latency ./folder --load-format dummy --batch-size 1 32 --ttft-len 2048
""",
    "throughput": """
usage: tokenspeed bench throughput [MODEL] [options]

Time the engine in this process, without a server: prompts alone (prompt tokens/s), and requests
with answers, all given at once (output tokens/s). Prompts are random ids; no prefix is reused. The
other options are those of serve.

Examples
  tokenspeed bench throughput ./folder
  tokenspeed bench throughput ./folder --num-prompts 1000 --input-len 512 --output-len 128
""",
}

_OWN = {
    "--output-json FILE": "write the result, with facts of the machine",
    "--json": "print it as JSON",
}

_NOT_OURS = {each.name for each in options_of(ServerConfig)} - {"log_level"}
_ENGINE = tuple(each for each in OPTIONS.values() if each.name not in _NOT_OURS)


def main(name: str, argv: list[str]) -> int:
    """The exit status of the measurement; ConfigError for what cannot be taken."""
    kind = _KINDS[name]
    own = {each.flag: each for each in options_of(kind)}
    topic = pages.wanted(argv)
    if topic is not None:
        texts = {f"{flag} {'N ...' if o.is_list else 'N'}": _text(o) for flag, o in own.items()}
        print(pages.page(_HEADS[name], _ENGINE, {**texts, **_OWN}, topic))
        return 0
    resolved = resolve(argv, os.environ, _command(own))
    if "--print-config" in resolved.own:
        print_settled(resolved)
        return 0
    chosen = kind(**_values(own, resolved.own))
    for note in resolved.notes:
        print(note, file=sys.stderr)
    is_told = "log_level" in resolved.sources
    setup_logging(resolved.config.server.log_level if is_told else "warning")
    path = resolved.own.get("--output-json")
    settings = given_settings(resolved, ("log_level",))
    status: int = importlib.import_module(_RUNNER).offline(
        settings,
        chosen.workloads(),
        command=name,
        num_iters=chosen.num_iters,
        path=Path(path[0]) if path else None,
        as_json="--json" in resolved.own,
    )
    return status


def _command(own: Mapping[str, Option]) -> Command:
    takes = {flag: Takes.MANY if each.is_list else Takes.ONE for flag, each in own.items()}
    return Command(
        options=_ENGINE,
        own={**COMMON, **takes, "--output-json": Takes.ONE, "--json": Takes.NOTHING},
        headings=tuple(heading for heading in TABLE if heading != "Server"),
        is_unwatched=True,
    )


def _values(own: Mapping[str, Option], given: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    values = {}
    for flag, each in own.items():
        if flag in given:
            try:
                values[each.name] = from_words(each, given[flag])
            except ConfigError as error:
                raise ConfigError(f"{flag} {error}") from None
    return values


def _text(option: Option) -> str:
    return option.help if option.is_list else f"{option.help} [{option.default}]"
