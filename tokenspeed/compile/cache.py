"""The compile cache: a folder of entries, found by the digest of their facts.

    ROOT/v1/SLUG-DIGEST/        an entry (`entry.py`); the slug is for people only
    ROOT/v1/.DIGEST.lock        held by the process that makes this entry; others wait
    ROOT/v1/.build-DIGEST-*/    an entry in the making; it appears under its name when it is whole
    ROOT/v1/.load-*/            what a process has loaded, and on CUDA reads until it ends; locked
    ROOT/v1/.aside-*/           an entry that was found damaged

Whatever is wrong with a cache, the answer is a miss with a reason, or another folder; never an
exception, and never a file that somebody else may have written.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenspeed.compile.causes import explained
from tokenspeed.compile.entry import (
    Contents,
    Damaged,
    Entry,
    finish_entry,
    read_entry,
    read_manifest,
)
from tokenspeed.compile.facts import Change, Facts, differences, digest_of
from tokenspeed.compile.locks import is_read, locked, release, try_lock
from tokenspeed.compile.trust import check_folder, own_folder
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.spans import span

VERSION = "v1"
_STALE_S = 86400.0
_MAX_NEIGHBOURS = 64
MAX_ENTRIES = 16
"""How many entries of one slug are kept: those used last. Each edit of a source makes a new one."""

_MAX_DIFFERENCES = 4
_ENTRY = re.compile(r"[a-z0-9][a-z0-9._-]*-([0-9a-f]{16})")

Fill = Callable[[Path], Contents]
"""Writes the files of a new entry into a folder."""


@dataclass(frozen=True)
class Miss:
    """Why there is no entry, in one line. `is_barred`: nor can there be one, until somebody has put
    something right.
    """

    reason: str
    is_barred: bool = False


def cache_root(setting: str | None) -> Path:
    """Where the cache is: as set, else TOKENSPEED_CACHE_DIR, else the user's cache folder. Links
    are followed here, once: what is checked afterwards is what they lead to. A user without a home
    has one below the temporary folder. Raises ConfigError for a path that is no text.
    """
    if chosen := setting or os.environ.get("TOKENSPEED_CACHE_DIR"):
        path = os.path.expanduser(chosen)
    else:
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):
            base = os.path.expanduser("~/.cache")
        path = os.path.join(base, "tokenspeed")
    if path.startswith("~"):
        path = os.path.join(tempfile.gettempdir(), f"tokenspeed-{os.getuid()}")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"--cache-dir {path!a}: the path is not UTF-8; name another") from None
    return Path(os.path.realpath(path))


class CompileCache:
    """The cache below one root. Nothing is created before something is stored."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._folder = root / VERSION

    def find(self, facts: Facts) -> Entry | Miss:
        """The entry for these facts, read and checked. One that is damaged is set aside; one that
        cannot be read just now stays as it is.
        """
        found: Entry | Miss
        with span("compile.cache_load") as look_up:
            try:
                found = self._find(facts)
            except (OSError, MemoryError) as error:
                found = Miss(f"the cache cannot be used: {_why(error)}", is_barred=True)
            look_up.cache = "hit" if isinstance(found, Entry) else "miss"
        return found

    def look(self, facts: Facts) -> Entry | None:
        """As `find`, for somebody who only wants to know: nothing is changed. Raises Damaged or
        OSError for an entry that cannot be used.
        """
        folders = [at for at in self.entry_folders() if at.name.endswith(f"-{digest_of(facts)}")]
        return _read(folders[0], facts) if folders else None

    def entry_folders(self) -> list[Path]:
        """The folders that are called as entries are. Raises Untrusted if others may write here."""
        if not self._is_there():
            return []
        named = (path for path in sorted(self._folder.iterdir()) if _ENTRY.fullmatch(path.name))
        return [path for path in named if path.is_dir() and not path.is_symlink()]

    def nearest(self, facts: Facts) -> tuple[str, list[Change]] | None:
        """The entry that is most alike, and the facts in which it differs."""
        best: tuple[int, str, list[Change]] | None = None
        for folder in sorted(self.entry_folders(), key=last_used)[-_MAX_NEIGHBOURS:]:
            with contextlib.suppress(OSError, Damaged):
                found = differences(facts, read_manifest(folder).facts)
                best = min(best or (1 << 30, "", []), (len(found), folder.name, found))
        return best and best[1:]

    def remove(self, folder: Path) -> bool:
        """Remove an entry; False if somebody is making it, or one that will be called the same."""
        matched = _ENTRY.fullmatch(folder.name)
        if matched is None or folder.parent != self._folder:
            raise ValueError(f"{folder} is no entry of this cache")
        lock = self._lock_of(matched[1])
        descriptor = try_lock(lock)
        if descriptor is None:
            return False
        try:
            doomed = self._folder / f".aside-{folder.name}-{time.time_ns():x}"
            os.rename(folder, doomed)  # whoever looks for it finds it whole or not at all
            shutil.rmtree(doomed)
            return True
        finally:
            release(lock, descriptor)

    def why_unwritable(self) -> str | None:
        """Why nothing can be stored here, or None."""
        try:
            self._create()
            with tempfile.TemporaryDirectory(prefix=".try-", dir=self._folder):
                return None
        except OSError as error:
            return _why(error)

    def store(
        self, facts: Facts, name: str, fill: Fill, waiting: Callable[[], None] = lambda: None
    ) -> Entry:
        """Make the entry, or take it from the process that is making it: `waiting` is then called
        now and again. Raises OSError where nothing can be written, Damaged if what was written
        cannot be read, and what `fill` raises.
        """
        digest = digest_of(facts)
        self._create()
        with locked(self._lock_of(digest), waiting) as is_alone:
            found = self._find(facts)
            if isinstance(found, Entry):
                return found
            self.sweep(digest if is_alone else None)
            place = self._folder / f"{_slug(name)}-{digest}"
            build = Path(tempfile.mkdtemp(prefix=f".build-{digest}-", dir=self._folder))
            try:
                contents = fill(build)
                with span("compile.cache_store"):
                    finish_entry(build, facts, contents)
                    self._publish(build, place)
            finally:
                shutil.rmtree(build, ignore_errors=True)
            self._thin(_slug(name), place)
        return read_entry(place)

    def _thin(self, slug: str, new: Path) -> None:
        """Of the entries with this slug keep the new one and those used last; what somebody makes
        just now stays as well.
        """
        named = [at for at in self.entry_folders() if at.name.rpartition("-")[0] == slug]
        others = sorted((at for at in named if at != new), key=last_used)
        for folder in others[: max(0, len(named) - MAX_ENTRIES)]:
            with contextlib.suppress(OSError):
                if self.remove(folder):
                    logger.info("compile cache: %s was not used for long: removed", folder.name)

    def abandon(self, digest: str) -> None:
        """Remove what is left of an entry's making, unless somebody makes it now."""
        with contextlib.suppress(OSError):
            if not self._is_there():
                return
            lock = self._lock_of(digest)
            if (descriptor := try_lock(lock)) is not None:
                try:
                    self.sweep(digest)
                finally:
                    release(lock, descriptor)

    def set_aside(self, folder: Path, reason: str) -> None:
        """Move a bad entry out of the way; it is kept for a day, for whoever wants to know."""
        logger.warning("compile cache: %s is set aside: %s", folder.name, reason)
        aside = self._folder / f".aside-{folder.name}-{time.time_ns():x}"
        with contextlib.suppress(OSError):
            os.utime(folder, follow_symlinks=False)  # the day begins now: sweep goes by this time
            os.rename(folder, aside)

    def _create(self) -> None:
        own_folder(self.root)
        own_folder(self._folder)

    def _is_there(self) -> bool:
        """Is there a cache? Raises Untrusted if others may write it."""
        if not self._folder.is_dir():
            return False
        check_folder(self.root)
        check_folder(self._folder)
        return True

    def _find(self, facts: Facts) -> Entry | Miss:
        if not self._is_there():
            return Miss(f"no entry in {self.root} yet")
        damage = ""
        for folder in self._folders_of(facts):
            try:
                entry = _read(folder, facts)
                with contextlib.suppress(OSError):
                    os.utime(folder)  # it is used; when it was made says READY
                return entry
            except Damaged as error:
                damage = _why(error)
                self.set_aside(folder, damage)
        if damage:
            return Miss(f"its entry was damaged and is set aside: {damage}")
        return Miss(self._nearest(facts))

    def _folders_of(self, facts: Facts) -> list[Path]:
        return sorted(self._folder.glob(f"[!.]*-{digest_of(facts)}"))

    def _nearest(self, facts: Facts) -> str:
        """How the entry that is most alike differs, in a line."""
        nearest = self.nearest(facts)
        if nearest is None:
            return f"no entry in {self.root} yet"
        name, found = nearest
        few = "; ".join(map(str, explained(found)[:_MAX_DIFFERENCES]))
        count = len(found) - _MAX_DIFFERENCES
        more = f"; and {count} more" if count > 0 else ""
        return f"the nearest entry, {name}, differs: {few}{more}"

    def _lock_of(self, digest: str) -> Path:
        return self._folder / f".{digest}.lock"

    def _publish(self, build: Path, place: Path) -> None:
        """Give a whole entry its name. One that is there by now is as good: it stays."""
        try:
            os.rename(build, place)
        except OSError:
            if not place.is_dir():
                raise
        with contextlib.suppress(OSError):
            descriptor = os.open(self._folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)

    def sweep(self, digest: str | None = None) -> None:
        """Remove what processes that were killed have left, and entries set aside long ago. With
        the `digest` whose lock is held also what is left of that entry's making, however young.
        """
        for path in self._folder.glob(".*"):
            with contextlib.suppress(OSError):
                is_ours = digest is not None and path.name.startswith(f".build-{digest}-")
                is_old = time.time() - path.lstat().st_mtime > _STALE_S
                if is_ours or is_old:
                    _remove_leftover(path)


def _read(folder: Path, facts: Facts) -> Entry:
    entry = read_entry(folder)
    if entry.manifest.facts != facts:
        raise Damaged("its facts are not those of its name")
    return entry


def last_used(folder: Path) -> float:
    try:
        return folder.lstat().st_mtime
    except OSError:
        return 0.0


def _remove_leftover(path: Path) -> None:
    """Remove a folder that nobody reads, or a lock file that nobody holds."""
    if path.is_symlink():
        return
    if path.is_dir() and not is_read(path):
        shutil.rmtree(path, ignore_errors=True)
    elif path.suffix == ".lock" and (descriptor := try_lock(path)) is not None:
        release(path, descriptor)


def _slug(name: str) -> str:
    """A model's name as part of a file name: of a path only the last part."""
    last = re.split(r"[/\\]", name.rstrip("/\\"))[-1].lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9._]+", "-", last).strip("-._")[:40] or "model"


def _why(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__
