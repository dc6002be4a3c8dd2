"""Entries of a compile cache with nothing real in them, and what a look-up must give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenspeed.compile.cache import CompileCache, Miss
from tokenspeed.compile.entry import Contents, Entry, StoredPiece

FACTS: dict[str, Any] = {
    "format": 1,
    "compile": {"dtype": "float32"},
    "versions": {"torch": "2.13"},
}
PIECE = "pieces/abc-all.bin"


def fill(folder: Path) -> Contents:
    """The files of an entry, none of them real."""
    (folder / "pieces").mkdir()
    (folder / "inductor" / "xy").mkdir(parents=True)
    (folder / "plan.json").write_text("{}")
    (folder / PIECE).write_bytes(b"piece" * 100)
    (folder / "inductor" / "xy" / "z.so").write_bytes(b"object")
    return Contents({"abc": StoredPiece([(0, None, PIECE)], None)}, None)


def found(cache: CompileCache, facts: dict[str, Any] = FACTS) -> Entry:
    entry = cache.find(facts)
    assert isinstance(entry, Entry), entry
    return entry


def missed(cache: CompileCache, facts: dict[str, Any] = FACTS) -> str:
    """Why there is no entry."""
    miss = cache.find(facts)
    assert isinstance(miss, Miss)
    assert "\n" not in miss.reason
    return miss.reason
