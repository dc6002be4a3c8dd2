"""Whole answers as JSON, in parts small enough that other requests are served in between.

Log-probabilities of a long prompt are many megabytes. The encoder holds the interpreter's lock from
end to end, so that a thread would stop the event loop just as long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Send

from tokenspeed.server.protocol_chat import ChatChoice
from tokenspeed.server.protocol_completions import CompletionChoice

SLICE = 256
"""Entries of a list that are encoded at once."""
PART_BYTES = 1 << 16
"""Parts are joined up to this size."""
_GAP = b"\0"
"""Where a list is left out. No JSON holds it: in strings it is escaped."""


async def send_answer(send: Send, answer: msgspec.Struct) -> None:
    """An answer with status 200. The loop goes round after each part."""
    parts: list[bytes] = []
    for part in joined(json_parts(answer)):
        if parts:
            await asyncio.sleep(0)
        parts.append(part)
    size = str(sum(map(len, parts))).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", size)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for left, part in enumerate(parts, 1 - len(parts)):
        await send({"type": "http.response.body", "body": part, "more_body": left < 0})


def joined(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes, as soon as there are `PART_BYTES` of them."""
    kept: list[bytes] = []
    size = 0
    for part in parts:
        kept.append(part)
        size += len(part)
        if size >= PART_BYTES:
            yield b"".join(kept)
            kept, size = [], 0
    yield b"".join(kept)


def json_parts(value: msgspec.Struct) -> Iterator[bytes]:
    """What `msgspec.json.encode(value)` is, bit by bit."""
    lists: list[list[Any]] = []
    first, *others = msgspec.json.encode(_without_long(value, lists)).split(_GAP)
    yield first
    for long, rest in zip(lists, others, strict=True):
        yield from _list_parts(long)
        yield rest


def _without_long(value: Any, lists: list[list[Any]]) -> Any:
    """`value` with a gap for each long list in it, which is added to `lists`, in order."""
    if isinstance(value, list):
        if len(value) > SLICE or (value and isinstance(value[0], CompletionChoice | ChatChoice)):
            lists.append(value)
            return msgspec.Raw(_GAP)
        shorter = [_without_long(each, lists) for each in value]
        return shorter if any(map(_differ, shorter, value)) else value
    if not isinstance(value, msgspec.Struct):
        return value
    fields = {name: getattr(value, name) for name in value.__struct_fields__}
    changed = {
        name: new for name, old in fields.items() if _differ(new := _without_long(old, lists), old)
    }
    return msgspec.structs.replace(value, **changed) if changed else value


def _differ(one: object, other: object) -> bool:
    return one is not other


def _list_parts(long: list[Any]) -> Iterator[bytes]:
    if isinstance(long[0], CompletionChoice | ChatChoice):
        for index, each in enumerate(long):
            yield b"," if index else b"["
            yield from json_parts(each)
    else:
        for start in range(0, len(long), SLICE):
            yield b"," if start else b"["
            yield msgspec.json.encode(long[start : start + SLICE])[1:-1]
    yield b"]"
