"""Responses that can be asked for again or gone on from: in memory, for a while, within a size.

They are kept as the JSON that was sent, so that what the store takes is what it counts. Of several
HTTP processes the first keeps them, and the others ask it (`coordinator_client.py`).
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

ENTRY_OVERHEAD = 512
"""Bytes that an entry takes beside its JSON, generously."""


@dataclass(frozen=True)
class StoredResponse:
    """`answer` is the response, `items` the list of all items up to its end, both as JSON."""

    answer: bytes
    items: bytes
    expires: float

    @property
    def size(self) -> int:
        return len(self.answer) + len(self.items) + ENTRY_OVERHEAD


class Responses(Protocol):
    """Where handlers find and leave responses."""

    @property
    def is_on(self) -> bool: ...
    async def put(self, id: str, answer: bytes, items: bytes) -> bool: ...
    async def get(self, id: str) -> StoredResponse | None: ...
    async def delete(self, id: str) -> bool: ...


class ResponseStore:
    """Holds up to `max_bytes`, the oldest going first, each for `seconds`."""

    def __init__(
        self, max_bytes: int, seconds: float, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_bytes, self._seconds, self._now = max_bytes, seconds, now
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    async def put(self, id: str, answer: bytes, items: bytes) -> bool:
        """Keep a response; False if it is larger than the whole store."""
        entry = StoredResponse(answer, items, self._now() + self._seconds)
        if entry.size > self._max_bytes:
            return False
        self._forget(id)
        self._entries[id] = entry
        self.num_bytes += entry.size
        self._drop()
        return True

    async def get(self, id: str) -> StoredResponse | None:
        """A response that is still there."""
        self._drop()
        return self._entries.get(id)

    async def delete(self, id: str) -> bool:
        """Forget a response; was it there?"""
        return self._forget(id)

    def _forget(self, id: str) -> bool:
        entry = self._entries.pop(id, None)
        if entry is None:
            return False
        self.num_bytes -= entry.size
        return entry.expires > self._now()

    def _drop(self) -> None:
        """Forget what is too old or too much. All live equally long: the first in ends first."""
        while self._entries:
            id, oldest = next(iter(self._entries.items()))
            if oldest.expires > self._now() and self.num_bytes <= self._max_bytes:
                return
            self._forget(id)
