"""What `bench serve` was told, read and checked, with everything that it will ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokenspeed.bench.dataset import Session, random_sessions
from tokenspeed.bench.dataset_file import file_sessions
from tokenspeed.bench.http_client import Address, BadURL
from tokenspeed.bench.serve_options import METRICS, ServeOptions
from tokenspeed.options import ConfigError
from tokenspeed.text.errors import ModelError
from tokenspeed.text.source import resolve_model
from tokenspeed.text.tokenizer import Tokenizer, load_tokenizer

API_KEYS = ("OPENAI_API_KEY", "TOKENSPEED_API_KEY")
"""Variables that a key is read from: never a command line, which others can read."""


@dataclass(frozen=True)
class Plan:
    """The options, read and checked."""

    options: ServeOptions
    address: Address
    headers: Mapping[str, str]
    sessions: Sequence[Session]
    percentiles: Sequence[float]
    shown: Sequence[str]
    limits_ms: Mapping[str, float]
    fields: Mapping[str, Any]


def make_plan(options: ServeOptions, environ: Mapping[str, str]) -> Plan:
    """Read the options that are text, and make what will be asked. Raises ConfigError."""
    target, output = options.target, options.output
    key = next((environ[name] for name in API_KEYS if environ.get(name)), None)
    try:
        address = Address.parse(target.base_url or f"http://{target.host}:{target.port}")
    except BadURL as error:
        raise ConfigError(f"--base-url: {error}") from None
    fields: dict[str, Any] = {"temperature": target.temperature}
    fields |= {"ignore_eos": True} if target.ignore_eos else {}
    if target.return_token_ids or _joins_ids(options):
        fields["return_token_ids"] = True
    shown = [name.strip() for name in output.percentile_metrics.split(",") if name.strip()]
    if set(shown) - set(METRICS):
        raise ConfigError(f"--percentile-metrics must be of {','.join(METRICS)}")
    if not all("=" in pair for pair in output.metadata):
        raise ConfigError("--metadata takes key=value")
    return Plan(
        options=options,
        address=address,
        headers={"authorization": f"Bearer {key}"} if key else {},
        sessions=_sessions(options),
        percentiles=_percentiles(output.metric_percentiles),
        shown=shown,
        limits_ms=_limits(output.goodput),
        fields=fields | _extra(target.extra_body),
    )


def _sessions(options: ServeOptions) -> list[Session]:
    tokenizer = None
    if options.target.tokenizer is not None:
        tokenizer = _tokenizer(options.target.tokenizer)
    if options.dataset.dataset_path is not None:
        return file_sessions(options, tokenizer)
    return random_sessions(options, tokenizer)


def _tokenizer(name: str) -> Tokenizer:
    try:
        return load_tokenizer(resolve_model(name, need_weights=False), name)
    except ModelError as error:
        raise ConfigError(f"--tokenizer: {error}") from None


def _joins_ids(options: ServeOptions) -> bool:
    """Whether later requests of a conversation repeat the ids of answers."""
    is_text = options.is_chat or options.target.tokenizer is not None
    return options.dataset.dataset_name == "multi-turn" and not is_text


def _percentiles(text: str) -> list[float]:
    found = [_number(word, "--metric-percentiles") for word in text.split(",") if word.strip()]
    if not all(0 <= each <= 100 for each in found):
        raise ConfigError(f"--metric-percentiles must be from 0 to 100, got {text[:100]!r}")
    return found


def _limits(words: Sequence[str]) -> dict[str, float]:
    limits = {}
    for word in words:
        name, _, value = word.partition(":")
        if name not in METRICS or name == "itl":
            raise ConfigError(f"--goodput takes ttft:MS, tpot:MS and e2el:MS, got {word[:100]!r}")
        limits[name] = _number(value, "--goodput")
        if not 0 <= limits[name] <= 1e9:
            raise ConfigError(f"--goodput must be from 0 to 1e9 ms, got {word[:100]!r}")
    return limits


def _number(text: str, flag: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{flag} must be a number, got {text[:100]!r}") from None


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text) if text else {}
    except msgspec.DecodeError:
        found = None
    if not isinstance(found, dict):
        raise ConfigError("--extra-body must be a JSON object, such as '{\"top_p\": 0.9}'")
    return found
