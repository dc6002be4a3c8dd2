"""The cache's folders: whole entries or none, whoever writes, breaks, holds or owns them."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from compile_entries import FACTS, PIECE, fill, found, missed

from tokenspeed.compile import cache as cache_module
from tokenspeed.compile import entry as entry_module
from tokenspeed.compile.cache import CompileCache, Miss, cache_root
from tokenspeed.compile.entry import Contents, Damaged, Entry, StoredPiece, finish_entry
from tokenspeed.compile.facts import digest_of

OTHER = FACTS | {"compile": {"dtype": "bfloat16"}}


def never(folder: Path) -> Contents:
    raise AssertionError("the entry is there")


@pytest.fixture
def cache(tmp_path: Path) -> CompileCache:
    return CompileCache(tmp_path / "root")


@pytest.fixture
def stored(cache: CompileCache) -> Entry:
    return cache.store(FACTS, "/home/a/My Model-1.5B.gguf", fill)


def test_an_empty_cache_is_a_miss_and_stays_empty(cache: CompileCache) -> None:
    assert "no entry in" in missed(cache)
    assert not cache.root.exists()


def test_what_is_stored_is_found(cache: CompileCache, stored: Entry) -> None:
    assert stored.folder.name == f"my-model-1.5b-{digest_of(FACTS)}"
    entry = found(cache)
    assert entry == stored == cache.store(FACTS, "another name", never)
    assert entry.manifest.facts == FACTS
    assert entry.files == {
        "plan.json": b"{}",
        PIECE: b"piece" * 100,
        "inductor/xy/z.so": b"object",
    }
    manifest = json.loads((entry.folder / "manifest.json").read_text())
    assert manifest["facts"] == FACTS and manifest["files"].keys() == entry.files.keys()
    assert (entry.folder / "READY").stat().st_mtime_ns >= max(
        path.stat().st_mtime_ns for path in entry.folder.rglob("*") if path.is_file()
    )


def test_nobody_else_may_read_or_write(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        stored = CompileCache(tmp_path / "cache" / "root").store(FACTS, "m", fill)
    finally:
        os.umask(before)
    for path in (root := stored.folder.parent.parent, *root.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_nothing_half_made_is_left(cache: CompileCache, stored: Entry) -> None:
    with pytest.raises(ZeroDivisionError):
        cache.store(OTHER, "x", lambda folder: fill(folder) and 1 // 0)
    assert [path.name for path in stored.folder.parent.iterdir()] == [stored.folder.name]


def test_a_miss_names_what_differs(cache: CompileCache, stored: Entry) -> None:
    assert missed(cache, OTHER) == (
        f"the nearest entry, {stored.folder.name}, differs: "
        "compile.dtype 'bfloat16' (there 'float32'), set by --dtype"
    )
    many = {"format": 1, **{f"f{i}": i for i in range(20)}}
    assert missed(cache, many).endswith("; and 18 more")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "a byte is another": lambda e: (e / PIECE).write_bytes(b"piecE" + b"piece" * 99),
    "cut short": lambda e: os.truncate(e / PIECE, 7),
    "empty": lambda e: os.truncate(e / "inductor/xy/z.so", 0),
    "longer": lambda e: (e / "plan.json").write_text("{} "),
    "a file is gone": lambda e: (e / PIECE).unlink(),
    "never finished": lambda e: (e / "READY").unlink(),
    "READY of another": lambda e: (e / "READY").write_text("0" * 64),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "manifest cut short": lambda e: os.truncate(e / "manifest.json", 99),
    "a folder for a file": lambda e: ((e / PIECE).unlink(), (e / PIECE).mkdir()),
    "a link for a file": lambda e: ((e / PIECE).rename(e / "x"), (e / PIECE).symlink_to(e / "x")),
    "a pipe for a file": lambda e: ((e / PIECE).unlink(), os.mkfifo(e / PIECE)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_set_aside_and_made_again(
    cache: CompileCache, stored: Entry, damage: str
) -> None:
    DAMAGES[damage](stored.folder)
    missed(cache)
    (aside,) = stored.folder.parent.glob(".aside-*")
    assert stored.folder.name in aside.name
    assert cache.store(FACTS, "/home/a/My Model-1.5B.gguf", fill).files == stored.files
    found(cache)


@pytest.mark.parametrize(
    "error", [OSError(24, "Too many open files"), OSError(5, "Input/output error"), MemoryError()]
)
def test_an_entry_that_cannot_be_read_just_now_stays(
    cache: CompileCache, stored: Entry, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fail(*args: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(entry_module, "read_own_file", fail)
        miss = cache.find(FACTS)
        assert isinstance(miss, Miss) and miss.is_barred
    assert found(cache).files == stored.files


def rewrite(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change the manifest, with a READY that belongs to it."""
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    data = (folder / "manifest.json").read_bytes()
    (folder / "READY").write_text(entry_module._digest(data))


LIES: dict[str, Callable[[dict[str, object]], object]] = {
    "other facts": lambda m: m["facts"].update(format=2),  # type: ignore[union-attr]
    "other format": lambda m: m.update(format=99),
    "no list": lambda m: m.update(files=7),
    "a path out of it": lambda m: m["files"].update({"../../x": "0"}),  # type: ignore[union-attr]
    "an absolute path": lambda m: m["files"].update({"/etc/passwd": "0"}),  # type: ignore[union-attr]
    "a piece unnamed": lambda m: m["files"].pop(PIECE),  # type: ignore[union-attr]
    "no plan": lambda m: m["files"].pop("plan.json"),  # type: ignore[union-attr]
    "too many files": lambda m: m.update(files={f"f{i}": "0" for i in range(5000)}),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_not_believed(cache: CompileCache, stored: Entry, lie: str) -> None:
    rewrite(stored.folder, LIES[lie])
    missed(cache)
    assert not stored.folder.exists()


PLACES = ["", "READY", "manifest.json", PIECE, "inductor", "..", "../.."]


@pytest.mark.parametrize("place", PLACES)
def test_what_others_may_write_is_not_read(cache: CompileCache, stored: Entry, place: str) -> None:
    path = stored.folder / place
    path.chmod(path.stat().st_mode | stat.S_IWGRP)
    assert "others may write" in missed(cache)
    with pytest.raises(OSError, match="others may write"):
        cache.store(FACTS, "x", never)
    path.chmod(path.stat().st_mode & ~stat.S_IWGRP)
    found(cache)


def test_what_belongs_to_another_is_not_read(
    cache: CompileCache, stored: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert f"belongs to user {mine}, not to {mine + 1}" in missed(cache)
    assert "belongs to user" in (cache.why_unwritable() or "")


def test_a_link_to_a_cache_is_none(cache: CompileCache, stored: Entry, tmp_path: Path) -> None:
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake" / "v1").symlink_to(stored.folder.parent)
    assert "is not a folder" in missed(CompileCache(tmp_path / "fake"))


def test_a_root_that_cannot_be_written_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = CompileCache(tmp_path / "file" / "root")
    missed(cache)
    assert "Not a directory" in (cache.why_unwritable() or "")
    assert CompileCache(tmp_path / "new").why_unwritable() is None


def test_a_read_only_cache_serves(
    cache: CompileCache, stored: Entry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    for name in ("mkdir", "rename", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    assert found(cache).files == stored.files
    assert "Read-only" in (cache.why_unwritable() or "")
    assert not stored.write_tuning(b"{}")
    os.truncate(stored.folder / PIECE, 3)
    missed(cache)


def test_a_tuning_table_is_kept_beside_the_manifest(cache: CompileCache, stored: Entry) -> None:
    assert stored.read_tuning() is None
    assert stored.write_tuning(b"[1]") and stored.write_tuning(b"[2]")
    assert found(cache).read_tuning() == b"[2]"
    assert {path.name for path in stored.folder.iterdir()} >= {"tuning.json", "READY"}
    assert not list(stored.folder.glob(".tuning-*"))
    (stored.folder / "tuning.json").chmod(0o666)
    assert stored.read_tuning() is None


def test_an_entry_that_cannot_be_read_back_is_an_error(cache: CompileCache) -> None:
    def fill_wrongly(folder: Path) -> Contents:
        fill(folder)
        return Contents({"abc": StoredPiece([(0, None, "pieces/no.bin")], None)}, None)

    with pytest.raises(Damaged, match="the manifest lacks"):
        cache.store(FACTS, "m", fill_wrongly)


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("smollm2", "smollm2"),
        ("Qwen/Qwen3-0.6B", "qwen3-0.6b"),
        ("/a/b/", "b"),
        ("../..", "model"),
        ("", "model"),
        ("ü" * 99, "model"),
        ("x" * 99, "x" * 40),
    ],
)
def test_a_slug_is_a_plain_file_name(name: str, slug: str) -> None:
    assert cache_module._slug(name) == slug


def test_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    monkeypatch.delenv("TOKENSPEED_CACHE_DIR", raising=False)
    assert cache_root(None) == Path("/h/.cache/tokenspeed")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_root(None) == Path("/x/tokenspeed")
    monkeypatch.setenv("TOKENSPEED_CACHE_DIR", "~/c")
    assert cache_root(None) == Path("/h/c")
    assert cache_root("/given") == Path("/given")


def test_a_link_to_a_root_is_followed_once(cache: CompileCache, stored: Entry) -> None:
    link = cache.root.parent / "link"
    link.symlink_to(cache.root)
    assert cache_root(str(link)) == cache.root
    assert "is not a folder" in missed(CompileCache(link))


def test_an_entry_is_finished_by_READY(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    write = entry_module.write_file
    monkeypatch.setattr(
        entry_module,
        "write_file",
        lambda path, data: (written.append(path.name), write(path, data)),
    )
    contents = fill(tmp_path)
    finish_entry(tmp_path, FACTS, contents)
    assert written == ["manifest.json", "READY"]
