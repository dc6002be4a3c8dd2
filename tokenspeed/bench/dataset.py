"""What is asked of a server: sessions of one request, or of several that build on each other.

Without a tokenizer, random prompts are token ids for completions and words for chat, where a word
is about a token; the server's usage says how many they were. With one they are text whose tokens
were counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenspeed.bench.serve_options import DatasetOptions, ServeOptions
from tokenspeed.text.tokenizer import Tokenizer

Prompt = str | list[int]
Message = dict[str, Any]

FIRST_ID = 100
"""Ids below are left out where the vocabulary allows: special tokens stand there in many models."""
_WORDS = (
    "the of and in to a is was for on as by with he that it at from his an were are which this "
    "also be has or had first one their its new after but who not they have her she"
).split()


@dataclass(frozen=True)
class Turn:
    """One request. `prompt` is what it adds to its conversation, or whole messages."""

    prompt: Prompt | list[Message]
    input_len: int
    max_tokens: int


@dataclass(frozen=True)
class Session:
    """Requests, one after the other: each begins with those before it and their answers."""

    turns: Sequence[Turn]
    think_s: Sequence[float]
    """Pauses before each turn."""


Draw = Callable[[int], Prompt]
"""A prompt of that many random tokens."""


def random_sessions(options: ServeOptions, tokenizer: Tokenizer | None) -> list[Session]:
    """Sessions of the datasets that need no file."""
    chosen = options.dataset
    source = random.Random(chosen.seed)
    draw = _drawing(options, tokenizer, source)
    match chosen.dataset_name:
        case "random":
            return _random(chosen, draw, source)
        case "shared-prefix":
            return _shared_prefix(chosen, draw, source)
        case "multi-turn":
            return [_conversation(chosen, draw, source) for _ in range(chosen.num_prompts)]
    raise ValueError(f"{chosen.dataset_name} is no random dataset")


def one_request(prompt: Prompt | list[Message], input_len: int, max_tokens: int) -> Session:
    return Session([Turn(prompt, input_len, max_tokens)], [0.0])


def join(first: Prompt, second: Prompt) -> Prompt:
    """Two prompts of a kind, one after the other."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first} {second}" if first and second else first + second
    return [*first, *second]


def _random(options: DatasetOptions, draw: Draw, source: random.Random) -> list[Session]:
    prefix = draw(options.random_prefix_len)
    sessions = []
    for _ in range(options.num_prompts):
        length = _length(options.random_input_len, options, source)
        output = _length(options.random_output_len, options, source)
        prompt = join(prefix, draw(length))
        sessions.append(one_request(prompt, options.random_prefix_len + length, output))
    return sessions


def _shared_prefix(options: DatasetOptions, draw: Draw, source: random.Random) -> list[Session]:
    prefixes = [draw(options.shared_prefix_len) for _ in range(options.shared_prefix_groups)]
    sessions = []
    for number in range(options.num_prompts):
        own = _length(options.shared_prefix_own_len, options, source)
        output = _length(options.random_output_len, options, source)
        prompt = join(prefixes[number % len(prefixes)], draw(own))
        sessions.append(one_request(prompt, options.shared_prefix_len + own, output))
    return sessions


def _conversation(options: DatasetOptions, draw: Draw, source: random.Random) -> Session:
    turns, total = [], 0
    for number in range(options.num_turns):
        mean = options.turn_input_len if number else options.random_input_len
        length = _length(mean, options, source)
        output = _length(options.random_output_len, options, source)
        turns.append(Turn(draw(length), total + length, output))
        total += length + output
    rate = 1 / options.think_time if options.think_time else 0.0
    pauses = [source.expovariate(rate) if rate and number else 0.0 for number in range(len(turns))]
    return Session(turns, pauses)


def _length(mean: int, options: DatasetOptions, source: random.Random) -> int:
    spread = options.random_range_ratio
    return source.randint(max(1, round(mean * (1 - spread))), max(1, round(mean * (1 + spread))))


def _drawing(options: ServeOptions, tokenizer: Tokenizer | None, source: random.Random) -> Draw:
    size = options.dataset.vocab_size if tokenizer is None else tokenizer.vocab_size
    ids = range(FIRST_ID if size > 2 * FIRST_ID else 0, size)

    def token_ids(length: int) -> Prompt:
        return source.choices(ids, k=length)

    def words(length: int) -> Prompt:
        return " ".join(source.choices(_WORDS, k=length))

    def text(length: int) -> Prompt:
        assert tokenizer is not None
        found = tokenizer.decode(source.choices(ids, k=length))
        # Tokens join differently when they are text: cut what became more.
        kept = tokenizer.encode(found, add_special_tokens=False)[:length]
        return tokenizer.decode(kept)

    if tokenizer is not None:
        return text
    return words if options.is_chat else token_ids
