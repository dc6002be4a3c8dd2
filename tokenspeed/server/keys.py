"""The API keys of a server: given one by one, or in a file that is read again when it changes.

Only digests are kept. A sent key is compared with all of them, in a time that does not tell how
much of it is right or whose it is.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from pathlib import Path

from tokenspeed.log import logger
from tokenspeed.options import ConfigError

MAX_KEY_FILE_BYTES = 1 << 20
LOOK_S = 1.0
"""How long a changed file may go unnoticed."""

_Signature = tuple[int, int, int]


class Keys:
    """Those of `given`, and those in the file at `path`: one a line, `#` begins a comment. Without
    both, the API is open. Raises ConfigError if the file gives none.
    """

    def __init__(self, given: Sequence[str], path: str | None) -> None:
        self._given = [_digest(key.encode()) for key in given]
        self._path = None if path is None else Path(path)
        self._signature: _Signature | None = None
        self._digests = self._given
        self._looked = time.monotonic()
        if self._path is not None:
            self._digests = self._given + self._read(self._path)

    @property
    def are_asked(self) -> bool:
        """Whether clients need one."""
        return bool(self._digests)

    def match(self, sent: str) -> bool:
        """Whether `sent`, a header's value as Latin-1, is one of the keys."""
        self._look()
        digest = _digest(sent.encode("latin-1"))  # the bytes as they came
        matches = [hmac.compare_digest(digest, each) for each in self._digests]
        return any(matches)

    def reload(self) -> None:
        """Read the file now. One that gives no keys is logged, and those of before go on."""
        if self._path is None:
            return
        try:
            self._digests = self._given + self._read(self._path)
            logger.info("read %d API keys from --api-key-file", len(self._digests))
        except ConfigError as error:
            logger.error("the API keys stay as they are: %s", error)

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now - self._looked < LOOK_S:
            return
        self._looked = now
        if _signature(self._path) != self._signature:
            self.reload()

    def _read(self, path: Path) -> list[bytes]:
        self._signature = _signature(path)  # before reading: a later change is seen as one
        try:
            with path.open("rb") as file:
                data = file.read(MAX_KEY_FILE_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"--api-key-file cannot be read: {error.strerror}") from None
        if len(data) > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"--api-key-file has more than {MAX_KEY_FILE_BYTES} bytes")
        lines = [line.strip() for line in data.splitlines()]
        keys = [line for line in lines if line and not line.startswith(b"#")]
        if not keys:
            raise ConfigError("--api-key-file has no keys: write one a line")
        return [_digest(key) for key in keys]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _signature(path: Path) -> _Signature | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
