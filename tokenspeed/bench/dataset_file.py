"""Requests out of a file: JSON lines, or one JSON list, of prompts or conversations.

An entry is {"prompt": text or ids}, {"messages": [...]} or, as ShareGPT's files have it,
{"conversations": [{"from": ..., "value": ...}, ...]}: the first message is the prompt, and the
answer after it says how long the output is. "output_tokens" or "max_tokens" say it outright.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.bench.dataset import Message, Prompt, Session, one_request
from tokenspeed.bench.serve_options import MAX_LEN, ServeOptions
from tokenspeed.options import ConfigError
from tokenspeed.text.tokenizer import Tokenizer

MAX_FILE_BYTES = 4 << 30
MIN_TOKENS, MAX_PROMPT, MAX_TOTAL = 4, 1024, 2048
"""ShareGPT entries outside these are left out, as other benchmarks do."""
_TOKENS_A_WORD = 4 / 3
"""Where no tokenizer counts."""


class _Entry(msgspec.Struct):
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    conversations: list[dict[str, Any]] | None = None
    output_tokens: int | None = None
    max_tokens: int | None = None


def file_sessions(options: ServeOptions, tokenizer: Tokenizer | None) -> list[Session]:
    """As many requests as asked for, in the file's order, or shuffled if it is ShareGPT's; a short
    file is begun again. Raises ConfigError.
    """
    chosen = options.dataset
    path = Path(chosen.dataset_path or "")
    entries = list(_entries(path))
    if chosen.dataset_name == "sharegpt":
        random.Random(chosen.seed).shuffle(entries)
    sessions: list[Session] = []
    for number, entry in enumerate(entries):
        session = _session(entry, options, tokenizer)
        if session is not None:
            sessions.append(session)
        elif chosen.dataset_name == "custom":
            raise ConfigError(
                f"{path}: entry {number + 1} has neither prompt, messages nor conversations that "
                f"{options.endpoint} can take"
            )
        if len(sessions) == chosen.num_prompts:
            break
    if not sessions:
        raise ConfigError(f"{path} has no usable entry")
    return [sessions[number % len(sessions)] for number in range(chosen.num_prompts)]


def _entries(path: Path) -> Iterator[_Entry]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"--dataset-path: {error}") from None
    try:
        if data.lstrip()[:1] == b"[":
            yield from msgspec.json.decode(data, type=list[_Entry])
        else:
            for line in filter(bytes.strip, data.splitlines()):
                yield msgspec.json.decode(line, type=_Entry)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no list of requests: {error}") from None


def _session(entry: _Entry, options: ServeOptions, tokenizer: Tokenizer | None) -> Session | None:
    """None for what is not to be asked."""
    asked = entry.output_tokens or entry.max_tokens
    prompt: Prompt | list[Message] | None = entry.prompt
    if entry.messages is not None and options.is_chat:
        prompt = entry.messages
    input_len = 0
    if entry.conversations is not None:
        said = [each.get("value") for each in entry.conversations[:2]]
        if len(said) < 2 or not all(isinstance(each, str) for each in said):
            return None
        prompt = str(said[0])
        input_len = _count(prompt, tokenizer)
        output = asked or _count(str(said[1]), tokenizer)
        if not _is_usual(input_len, output):
            return None
        asked = output
    if prompt is None or (options.is_chat and isinstance(prompt, list) and not _are_dicts(prompt)):
        return None
    if not input_len and not _are_dicts(prompt):
        input_len = len(prompt) if isinstance(prompt, list) else _count(str(prompt), tokenizer)
    limit = min(max(asked or options.dataset.random_output_len, 1), MAX_LEN)
    return one_request(prompt, input_len, limit)


def _are_dicts(prompt: object) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _count(text: str, tokenizer: Tokenizer | None) -> int:
    if tokenizer is not None:
        return len(tokenizer.encode(text))
    return round(len(text.split()) * _TOKENS_A_WORD)


def _is_usual(input_len: int, output_len: int) -> bool:
    return (
        min(input_len, output_len) >= MIN_TOKENS
        and input_len <= MAX_PROMPT
        and input_len + output_len <= MAX_TOTAL
    )
