"""The API keys of a server: given one by one, or in a file that is read again when it changes.

Only digests are kept. A sent key is compared with all of them, in a time that does not tell how
much of it is right or whose it is. A key of the file may have a limit: `KEY max_requests=4`. The
keys of whoever runs the server are others.
"""

from __future__ import annotations

import codecs
import hashlib
import hmac
import os
import re
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.server_config import ServerConfig
from tokenspeed.wording import counted

MAX_KEY_FILE_BYTES = 1 << 20
LOOK_S = 1.0
"""How long a changed file may go unnoticed."""
MAX_REQUESTS = 1 << 20
_COMMENT = re.compile(rb"(^|\s)#.*")
_LIMITED = re.compile(rb"(\S+)\s+max_requests=(\S*)")


@dataclass(frozen=True)
class Key:
    """`max_requests` of it are served at once, by all HTTP processes; None: as many as come."""

    digest: bytes
    max_requests: int | None = None


class Keys:
    """Those of `given`, and those in the file at `path`: one a line, `#` begins a comment. Without
    both, the API is open. `admin` are the operator's. Raises ConfigError if the file gives none, or
    a client has a key of the operator.
    """

    def __init__(self, given: Sequence[str], path: str | None, admin: Sequence[str] = ()) -> None:
        self._given = [Key(_digest(key.encode())) for key in given]
        self._admin = [_digest(key.encode()) for key in admin]
        if any(key.digest in self._admin for key in self._given):
            raise ConfigError("--admin-api-key is one of --api-key too: the operator needs another")
        self._path = path
        self._seen: bytes | str = b""
        """What the last look found: the digest of the file, or why it gives no keys."""
        self._keys = self._given
        self._looked = time.monotonic()
        if path is not None:
            data = _read(path)
            self._seen = _digest(data)
            self._keys = self._given + _keys_in(data, path, self._admin)

    @property
    def are_asked(self) -> bool:
        """Whether clients need one."""
        return bool(self._keys)

    @property
    def operator_has_own(self) -> bool:
        """Whether routes of the operator need a key that no client has."""
        return bool(self._admin)

    def is_admin(self, sent: str) -> bool:
        """Whether `sent`, a header's value as Latin-1, is a key of the operator."""
        digest = _digest(sent.encode("latin-1"))
        matches = [hmac.compare_digest(digest, each) for each in self._admin]
        return any(matches)

    def match(self, sent: str) -> Key | None:
        """Which key `sent`, a header's value as Latin-1, is; of equal ones the last."""
        if time.monotonic() - self._looked >= LOOK_S:
            self.reload()
        digest = _digest(sent.encode("latin-1"))  # the bytes as they came
        matches = [each for each in self._keys if hmac.compare_digest(digest, each.digest)]
        return matches[-1] if matches else None

    def reload(self) -> None:
        """Read the file now. One that gives no keys is logged, and those of before go on.

        Its bytes tell whether it has changed: size and time can be those of before.
        """
        if self._path is None:
            return
        self._looked = time.monotonic()
        seen: bytes | str
        try:
            data = _read(self._path)
            seen = _digest(data)
            if seen != self._seen:
                self._keys = self._given + _keys_in(data, self._path, self._admin)
                read = counted(len(self._keys), "API key")
                logger.info("read %s from --api-key-file", read)
        except ConfigError as error:
            seen = str(error)
            if seen != self._seen:
                logger.error("the API keys stay as they are: %s", error)
        self._seen = seen


def keys_of(server: ServerConfig) -> Keys:
    """Raises ConfigError."""
    return Keys(server.api_key, server.api_key_file, server.admin_api_key)


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"--api-key-file {path} must be a regular file: it is read again")
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-key-file {path} cannot be read: {error.strerror}") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise ConfigError(f"--api-key-file {path} has more than {MAX_KEY_FILE_BYTES} bytes")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """A pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def _keys_in(data: bytes, path: str, admin: Sequence[bytes]) -> list[Key]:
    lines = [
        _COMMENT.sub(b"", line).strip() for line in data.removeprefix(codecs.BOM_UTF8).splitlines()
    ]
    keys = {number: _key_in(number, line, path) for number, line in enumerate(lines, 1) if line}
    if not keys:
        raise ConfigError(f"--api-key-file {path} has no keys: write one a line")
    for number, key in keys.items():
        if key.digest in admin:
            raise ConfigError(
                f"--api-key-file {path}, line {number}: this is the operator's key "
                "(--admin-api-key); clients need others"
            )
    return list(keys.values())


def _key_in(number: int, line: bytes, path: str) -> Key:
    if any(byte < 0x20 or byte == 0x7F for byte in line):  # as UTF-16 has; no header can carry it
        raise ConfigError(
            f"--api-key-file {path}, line {number}: "
            "a key has no control characters; save it as UTF-8"
        )
    found = _LIMITED.fullmatch(line)
    if found is None:
        if len(line.split()) > 1:
            raise ConfigError(
                f"--api-key-file {path}, line {number}: a key is one word, alone or followed by "
                "max_requests=N"
            )
        return Key(_digest(line))
    key, limit = found.groups()
    if not limit.isdigit() or not 1 <= int(limit[:9]) <= MAX_REQUESTS:
        raise ConfigError(
            f"--api-key-file {path}, line {number}: max_requests must be from 1 to {MAX_REQUESTS}"
        )
    return Key(_digest(key), int(limit))
