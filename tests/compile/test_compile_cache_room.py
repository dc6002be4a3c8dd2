"""What a cache removes, and what it must not: leftovers, locks, entries that nobody uses."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import pytest
from compile_entries import FACTS, PIECE, fill, found, missed

from tokenspeed.compile import cache as cache_module
from tokenspeed.compile.cache import MAX_ENTRIES, CompileCache, cache_root
from tokenspeed.compile.entry import Damaged, Entry, parse_manifest
from tokenspeed.compile.locks import locked, read_lock, release, try_lock
from tokenspeed.options import ConfigError

OTHER = FACTS | {"compile": {"dtype": "bfloat16"}}


def facts(number: int) -> dict[str, Any]:
    return FACTS | {"number": number}


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "root")


@pytest.fixture
def stored(cache: CompileCache) -> Entry:
    return cache.store(FACTS, "m", fill)


def test_old_leftovers_are_swept(cache: CompileCache, stored: Entry) -> None:
    old = time.time() - 2 * cache_module._STALE_S
    for name in (".aside-x-1", ".load-abc", ".build-0123-x"):
        (stored.folder.parent / name).mkdir()
        os.utime(stored.folder.parent / name, (old, old))
    (stored.folder.parent / ".aside-young").mkdir()
    for name in (".0123.lock", ".4567.lock", ".89ab.lock"):
        (stored.folder.parent / name).touch()
    for name in (".0123.lock", ".4567.lock"):
        os.utime(stored.folder.parent / name, (old, old))
    with locked(stored.folder.parent / ".4567.lock", lambda: None):
        cache.store(OTHER, "m", fill)
        hidden = {path.name for path in stored.folder.parent.glob(".*")}
        assert hidden == {".aside-young", ".4567.lock", ".89ab.lock"}


def test_a_damaged_entry_is_kept_for_a_day(cache: CompileCache, stored: Entry) -> None:
    """However old it was when it was set aside."""
    old = time.time() - 2 * cache_module._STALE_S
    (stored.folder / PIECE).unlink()
    os.utime(stored.folder, (old, old))
    missed(cache)
    cache.sweep()
    (aside,) = stored.folder.parent.glob(".aside-*")
    os.utime(aside, (old, old))
    cache.sweep()
    assert not aside.exists()


def test_a_folder_that_is_read_is_not_swept(cache: CompileCache, stored: Entry) -> None:
    old = time.time() - 2 * cache_module._STALE_S
    folder = stored.folder.parent / ".load-abc"
    folder.mkdir()
    os.utime(folder, (old, old))
    first, second = read_lock(folder), read_lock(folder)
    assert first is not None and second is not None
    os.close(first)
    cache.sweep()
    assert folder.exists()
    os.close(second)
    cache.sweep()
    assert not folder.exists()


def test_a_lock_whose_file_is_gone_is_none(tmp_path: Path) -> None:
    """Who waits for a lock whose holder removes it does not get the removed one."""
    path = tmp_path / ".x.lock"
    waits: list[int] = []

    def let_go() -> None:
        waits.append(1)
        release(path, held)

    held = try_lock(path)
    assert held is not None and try_lock(path) is None
    with locked(path, let_go) as is_alone:
        assert is_alone and waits == [1] and try_lock(path) is None
    assert not path.exists()


def test_what_is_left_of_a_making_goes_unless_it_is_made_now(
    cache: CompileCache, stored: Entry
) -> None:
    digest = stored.folder.name.rpartition("-")[2]
    (left := stored.folder.parent / f".build-{digest}-x").mkdir()
    with locked(stored.folder.parent / f".{digest}.lock", lambda: None):
        cache.abandon(digest)
        assert left.exists()
    cache.abandon(digest)
    assert [path.name for path in left.parent.iterdir()] == [stored.folder.name]


def last_used(folder: Path, when: float) -> None:
    os.utime(folder, (when, when))


def test_of_a_model_the_entries_used_last_are_kept(cache: CompileCache) -> None:
    """Which one was found last counts, not which one was made last; other models count apart."""
    other = cache.store(OTHER, "another", fill)
    last_used(other.folder, 1.0)
    for number in range(MAX_ENTRIES):
        last_used(cache.store(facts(number), "m", fill).folder, 100.0 + number)
    assert len(cache.entry_folders()) == MAX_ENTRIES + 1
    found(cache, facts(0))
    cache.store(facts(99), "m", fill)
    assert len(cache.entry_folders()) == MAX_ENTRIES + 1
    missed(cache, facts(1))
    for there in (facts(0), facts(2), facts(99), OTHER):
        found(cache, there)


def test_an_entry_that_is_being_made_again_is_not_removed(cache: CompileCache) -> None:
    """Its lock is held: another process would find it gone in the middle of its work."""
    for number in range(MAX_ENTRIES):
        last_used(cache.store(facts(number), "m", fill).folder, 100.0 + number)

    digest = found(cache, facts(0)).folder.name.rpartition("-")[2]
    last_used(found(cache, facts(0)).folder, 1.0)
    with locked(cache.root / "v1" / f".{digest}.lock", lambda: None):
        cache.store(facts(99), "m", fill)
    found(cache, facts(0))


def test_the_nearest_is_looked_for_among_the_entries_used_last(
    cache: CompileCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "_MAX_NEIGHBOURS", 1)
    for number, when in ((0, 300.0), (1, 100.0), (2, 200.0)):
        last_used(cache.store(facts(number), f"m{number}", fill).folder, when)
    assert "the nearest entry, m0-" in missed(cache, facts(9))


def test_a_user_without_a_home_has_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # nothing is known of the user
    for name in ("TOKENSPEED_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    root = cache_root(None)
    assert root.is_absolute() and "~" not in str(root)
    assert root.name == f"tokenspeed-{os.getuid()}"


def test_a_cache_path_that_is_no_text_is_refused_in_one_line() -> None:
    with pytest.raises(ConfigError, match="is not UTF-8"):
        cache_root("/tmp/caf\udce9")


def test_brackets_without_end_are_damage() -> None:
    data = b'{"x":' + b"[" * 200_000
    with pytest.raises(Damaged):
        parse_manifest(data, hashlib.sha256(data).hexdigest().encode())
