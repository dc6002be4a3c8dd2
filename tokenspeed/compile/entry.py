"""One entry of the cache: a folder with everything that a start needs instead of a compiler.

    manifest.json           every fact of the key, what each file is for, each file's SHA-256
    plan.json               the program's plan
    pieces/HASH-RANGE.json  each distinct piece, for a token range: its calls, if there is nothing
    pieces/HASH-RANGE.bin   else to it, or an artifact of Inductor
    inductor/, triton/      objects that the artifacts load
    receipts/counts.json    what each pass did to each piece, and seconds by phase
    receipts/graphs.json    the pieces' graphs before and after, their kernels, near misses
    READY                   the manifest's SHA-256, written last
    tuning.json             measured later, by whoever needs it; data, and no part of the manifest

An entry is read whole, and each file checked against the manifest, before any of it is used.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokenspeed.compile.facts import FORMAT, Facts
from tokenspeed.compile.plan import TokenArgument
from tokenspeed.compile.trust import NoFile, check_folder, read_own_file, sync_folder, write_file

MANIFEST, READY, PLAN, RECEIPT = "manifest.json", "READY", "plan.json", "receipts/counts.json"
GRAPHS = "receipts/graphs.json"
TUNING = "tuning.json"
CALLS, ARTIFACT = ".json", ".bin"
"""How the files of pieces end."""
OBJECTS = ("inductor", "triton")
"""Folders with what artifacts load: compiled C++ of Inductor, and of Triton's driver."""

_MAX_JSON = 64 << 20
_MAX_FILES = 4096


class Damaged(ValueError):
    """An entry whose contents are not what they should be; the message says why, in one line."""


class Unloadable(RuntimeError):
    """An entry that proves nothing wrong, and still cannot be loaded here and now: no room, no
    compiler, no memory. The message says why, in one line.
    """


class StoredPiece(msgspec.Struct, frozen=True):
    """A piece's artifacts: file by (first, last) token count, and where it finds the count."""

    files: list[tuple[int, int | None, str]]
    tokens: TokenArgument | None


class Contents(msgspec.Struct, frozen=True):
    """What the files of an entry are for. `isa` is Inductor's, as `inductor_api` reads it."""

    pieces: dict[str, StoredPiece]
    isa: dict[str, Any] | None


class Manifest(msgspec.Struct, frozen=True):
    format: int
    facts: Facts
    contents: Contents
    files: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """A whole and checked entry."""

    folder: Path
    manifest: Manifest
    files: dict[str, bytes]

    @property
    def artifacts(self) -> list[str]:
        """The files of pieces that Inductor loads."""
        stored = self.manifest.contents.pieces.values()
        return [file for each in stored for _, _, file in each.files if file.endswith(ARTIFACT)]

    @property
    def can_keep_tuning(self) -> bool:
        return os.access(self.folder, os.W_OK)

    def read_tuning(self) -> bytes | None:
        """The tuning table, if there is one that only this user can have written."""
        try:
            return read_own_file(self.folder / TUNING, _MAX_JSON)
        except OSError:
            return None

    def write_tuning(self, data: bytes) -> bool:
        """Replace the tuning table in one step; False where the folder cannot be written."""
        try:
            with tempfile.TemporaryDirectory(prefix=".tuning-", dir=self.folder) as place:
                write_file(Path(place) / TUNING, data)
                os.replace(Path(place) / TUNING, self.folder / TUNING)
        except OSError:
            return False
        return True


def read_entry(folder: Path) -> Entry:
    """Read and check an entry. Raises Damaged, or OSError for what cannot be read or trusted."""
    manifest = read_manifest(folder)
    files = {}
    for name in manifest.files:
        try:
            files[name] = read_own_file(_inside(folder, name))
        except (FileNotFoundError, NoFile) as error:
            raise Damaged(f"{name} is gone, or no file") from error
        check_file(manifest, name, files[name])
    check_whole(manifest)
    return Entry(folder, manifest, files)


def check_file(manifest: Manifest, name: str, data: bytes) -> None:
    """Raise Damaged unless these are the bytes of the file that the manifest means."""
    if _digest(data) != manifest.files[name]:
        raise Damaged(f"{name} is not what was written")


def check_whole(manifest: Manifest) -> None:
    """Raise Damaged unless the manifest lists the files that a start needs."""
    named = {file for piece in manifest.contents.pieces.values() for _, _, file in piece.files}
    if missing := ({PLAN} | named) - manifest.files.keys():
        raise Damaged(f"the manifest lacks {min(missing)!r:.100}")


def read_manifest(folder: Path) -> Manifest:
    """The manifest alone, proved by READY. Raises Damaged or OSError."""
    check_folder(folder)
    try:
        ready = read_own_file(folder / READY, 128)
        data = read_own_file(folder / MANIFEST, _MAX_JSON)
    except (FileNotFoundError, NoFile) as error:
        raise Damaged("it was never finished") from error
    return parse_manifest(data, ready)


def parse_manifest(data: bytes, ready: bytes) -> Manifest:
    """A manifest out of its file's bytes, proved by those of READY. Raises Damaged."""
    if ready.decode(errors="replace") != _digest(data):
        raise Damaged("READY does not belong to the manifest")
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Damaged(f"the manifest cannot be read: {error}") from error
    if manifest.format != FORMAT:
        raise Damaged(f"its format is {manifest.format}, not {FORMAT}")
    if len(manifest.files) > _MAX_FILES:
        raise Damaged(f"the manifest names {len(manifest.files)} files")
    return manifest


def finish_entry(folder: Path, facts: Facts, contents: Contents) -> None:
    """Make the files in `folder` an entry: manifest, and last READY, all through to the disk."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_dir():
            path.chmod(0o700)
            continue
        path.chmod(0o600)
        files[path.relative_to(folder).as_posix()] = _digest(path.read_bytes())
        _sync(path)
    manifest = msgspec.json.encode(Manifest(FORMAT, facts, contents, files))
    write_file(folder / MANIFEST, msgspec.json.format(manifest, indent=1))
    write_file(folder / READY, _digest((folder / MANIFEST).read_bytes()).encode())
    for path in (*(path for path in folder.rglob("*") if path.is_dir()), folder):
        sync_folder(path)


def _inside(folder: Path, name: str) -> Path:
    """The path of a file of the entry; each folder on the way is checked as well."""
    parts = name.split("/")
    if not all(parts) or ".." in parts or "." in parts:
        raise Damaged(f"the manifest names {name!r:.80}")
    for depth in range(1, len(parts)):
        check_folder(folder.joinpath(*parts[:depth]))
    return folder.joinpath(*parts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())
