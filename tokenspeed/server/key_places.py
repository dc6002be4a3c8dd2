"""How many requests each API key with a limit has in work, over all HTTP processes of a server.

The first process keeps the counts; the others take places there and give them back
(`coordinator_client.py`).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Protocol


class KeyPlaces(Protocol):
    """Where requests get a place among those of their key."""

    def hold(self, key: bytes, most: int) -> contextlib.AbstractAsyncContextManager[bool]:
        """A place until the context ends, of which the key, known by its digest, has `most`; False
        where all are taken.
        """


class KeyCounts:
    """The counts. Lives on one event loop."""

    def __init__(self) -> None:
        self._num_held: Counter[bytes] = Counter()

    @property
    def num_held(self) -> int:
        """Of all keys."""
        return self._num_held.total()

    def take(self, key: bytes, most: int) -> bool:
        """Look and count at once: nothing can come between."""
        if self._num_held[key] >= most:
            return False
        self._num_held[key] += 1
        return True

    def give_back(self, key: bytes) -> None:
        self._num_held[key] -= 1
        if not self._num_held[key]:
            del self._num_held[key]

    @contextlib.asynccontextmanager
    async def hold(self, key: bytes, most: int) -> AsyncIterator[bool]:
        is_taken = self.take(key, most)
        try:
            yield is_taken
        finally:
            if is_taken:
                self.give_back(key)
