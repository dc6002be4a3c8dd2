"""One file that carries compiled programs to another machine: a tar that can be written in one way.

    archive.json      size and SHA-256 of every member after the next
    archive.sha256    the SHA-256 of archive.json
    v1/..., native/   files as they lie in a cache (`transfer.py`), sorted by name

An archive is code: whoever loads what is in it runs it. So it is believed only whole, and only if
each of its bytes is the one that would be written for these members. That leaves no room for links,
devices, owners, modes, times, names that lead elsewhere, duplicates, or members that nobody
declared. Nothing is packed together, so nothing can unpack to more than the file itself has. `tar
tf` lists it.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

INDEX, INDEX_DIGEST = "archive.json", "archive.sha256"
FORMAT = 1
MAX_BYTES = 1 << 30
"""Of an archive; it is held in memory while it is read."""
MAX_MEMBERS = 16384

_BLOCK = 512
_END = bytes(2 * _BLOCK)
_MAX_INDEX = 8 << 20
_HEADER = struct.Struct("100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12x")
_SIZE = slice(124, 136)
_CHECKSUM = slice(148, 156)
_PART = r"[A-Za-z0-9_][A-Za-z0-9._+-]*"
_NAME = re.compile(rf"{_PART}(/{_PART})+")
_KINDS = {b"1": "a hard link", b"2": "a symbolic link", b"3": "a device", b"4": "a device"}
_KINDS |= {b"5": "a folder", b"6": "a pipe"}


class ArchiveError(ValueError):
    """An archive that is refused: one line that names the member, and says why."""


class Member(msgspec.Struct, frozen=True):
    """What the index says of a member. `sha256` is in hex."""

    bytes: int
    sha256: str


class Index(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    members: dict[str, Member]


def write_archive(path: Path, members: Mapping[str, bytes]) -> str:
    """Write an archive, and replace what is at `path` by it in one step; its SHA-256.

    The same members give the same bytes. Raises ArchiveError for what no reader would take, and
    OSError.
    """
    digest = hashlib.sha256()
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with open(descriptor, "wb") as file:
            for block in _blocks(members):
                digest.update(block)
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return digest.hexdigest()


def read_archive(path: Path, sha256: str | None) -> dict[str, bytes]:
    """The members of an archive, each checked, and the whole against the digest that a person gave
    (None: no digest was given). Nothing is written. Raises ArchiveError and OSError.
    """
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise ArchiveError(f"{path} is not a file")
        if facts.st_size > MAX_BYTES:
            raise ArchiveError(f"{path} has {facts.st_size} bytes, more than {MAX_BYTES}")
        reader = _Reader(file)
        members = _read(reader, facts.st_size)
    if sha256 is not None and reader.digest.hexdigest() != sha256.lower():
        raise ArchiveError(f"{path} is another archive: its SHA-256 is {reader.digest.hexdigest()}")
    return members


def _blocks(members: Mapping[str, bytes]) -> Iterator[bytes]:
    index = Index(
        FORMAT, {name: Member(len(data), _sha256(data)) for name, data in sorted(members.items())}
    )
    _check(index)
    text = _encode(index)
    whole = {INDEX: text, INDEX_DIGEST: _sha256(text).encode()} | dict(sorted(members.items()))
    for name, data in whole.items():
        yield _header(name, len(data))
        yield data
        yield bytes(-len(data) % _BLOCK)
    yield _END


class _Reader:
    """Takes an archive from its beginning to its end, once. `digest` is that of what was taken."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = hashlib.sha256()

    def first(self) -> bytes:
        """The index, whose size only its own header says."""
        header = self._take(_BLOCK)
        size = header[_SIZE].rstrip(b"\0 ")
        if not re.fullmatch(rb"[0-7]{1,11}", size) or int(size, 8) > _MAX_INDEX:
            raise ArchiveError(f"this is no archive of compiled programs: it has no {INDEX}")
        _check_header(header, INDEX, int(size, 8))
        return self._contents(INDEX, int(size, 8))

    def member(self, name: str, size: int) -> bytes:
        """The contents of the next member, which has to be this one."""
        _check_header(self._take(_BLOCK), name, size)
        return self._contents(name, size)

    def end(self) -> None:
        rest = self._take(len(_END) + 1)
        if rest[:1] not in (b"", b"\0"):
            raise ArchiveError(f"{_shown(rest)} stands behind the last member, and is not declared")
        if rest != _END:
            raise ArchiveError("the end, behind the last member, is not what was written")

    def _contents(self, name: str, size: int) -> bytes:
        data, padding = self._take(size), self._take(-size % _BLOCK)
        if len(data) < size or len(padding) < -size % _BLOCK:
            raise ArchiveError(f"{name} is cut short")
        if any(padding):
            raise ArchiveError(f"{name} is followed by bytes that are not its own")
        return data

    def _take(self, size: int) -> bytes:
        data = self._file.read(size)
        self.digest.update(data)
        return data


def _read(reader: _Reader, num_bytes: int) -> dict[str, bytes]:
    text = reader.first()
    if reader.member(INDEX_DIGEST, 64) != _sha256(text).encode():
        raise ArchiveError(f"{INDEX} is not what was written, or {INDEX_DIGEST} is not")
    try:
        index = msgspec.json.decode(text, type=Index)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ArchiveError(f"{INDEX} cannot be read: {error}") from error
    _check(index)
    if _encode(index) != text:
        raise ArchiveError(f"{INDEX} is not in the form in which it is written")
    sizes = [len(text), 64, *(member.bytes for member in index.members.values())]
    declared = sum(_BLOCK + size + -size % _BLOCK for size in sizes) + len(_END)
    if declared > num_bytes:
        raise ArchiveError(f"{INDEX} declares {declared} bytes, the archive has {num_bytes}")
    members = {}
    for name, member in index.members.items():
        data = reader.member(name, member.bytes)
        if _sha256(data) != member.sha256:
            raise ArchiveError(f"{name} is not what was written")
        members[name] = data
    reader.end()
    return members


def _check(index: Index) -> None:
    """Raise ArchiveError unless every member may be there, under its name and with its size."""
    names = list(index.members)
    if index.format != FORMAT:
        raise ArchiveError(f"{INDEX}: its format is {index.format}, this version reads {FORMAT}")
    if len(names) > MAX_MEMBERS:
        raise ArchiveError(f"{INDEX} declares {len(names)} members, more than {MAX_MEMBERS}")
    folders = {name[:at] for name in names for at, letter in enumerate(name) if letter == "/"}
    for name in names:
        if not _NAME.fullmatch(name) or name in folders:
            raise ArchiveError(f"{name!r:.100} cannot be the name of a member")
    if names != sorted(names):
        raise ArchiveError(f"{INDEX} does not declare its members in order")
    for name, member in index.members.items():
        if not 0 <= member.bytes <= MAX_BYTES:
            raise ArchiveError(f"{name} has {member.bytes} bytes, more than {MAX_BYTES}")
    if sum(member.bytes for member in index.members.values()) > MAX_BYTES:
        raise ArchiveError(f"the members together have more than {MAX_BYTES} bytes")


def _header(name: str, size: int) -> bytes:
    """The one header that a member may have (POSIX ustar, section "pax", "ustar Interchange
    Format"): a plain file of nobody, of no time, that its owner may read and write.
    """
    whole = name.encode("ascii")
    cut = whole.rfind(b"/", 0, 156) if len(whole) > 100 else -1
    prefix, last = whole[: max(cut, 0)], whole[cut + 1 :]
    if len(last) > 100:
        raise ArchiveError(f"{name!r:.100} is too long for the name of a member")
    zero, blank = b"0000000\0", b" " * 8
    sizes = (b"%011o\0" % size, b"%011o\0" % 0)
    fields = (last, b"0000600\0", zero, zero, *sizes, blank, b"0", b"", b"ustar\0", b"00")
    header = _HEADER.pack(*fields, b"", b"", b"", b"", prefix)
    checksum = b"%06o\0 " % sum(header)
    return header[: _CHECKSUM.start] + checksum + header[_CHECKSUM.stop :]


def _check_header(header: bytes, name: str, size: int) -> None:
    if header == _header(name, size):
        return
    if len(header) < _BLOCK or not any(header):
        raise ArchiveError(f"{name} is missing: the archive ends before it")
    if kind := _KINDS.get(header[156:157]):
        raise ArchiveError(f"{_shown(header)} is {kind}; only plain files are taken")
    if _shown(header) != name:
        raise ArchiveError(f"{_shown(header)} stands where {name} should")
    raise ArchiveError(f"the header of {name} is not what was written")


def _shown(header: bytes) -> str:
    """The name in a header, as it may be printed."""
    last, prefix = header[:100].split(b"\0")[0], header[345:500].split(b"\0")[0]
    return ascii((prefix + b"/" * bool(prefix) + last).decode("latin-1"))[1:-1]


def _encode(index: Index) -> bytes:
    return msgspec.json.format(msgspec.json.encode(index), indent=1)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
