"""What the documents say of the code's own tables and limits."""

from __future__ import annotations

from code_in_documents import ROOT

from tokenspeed.config import COMPILE_TIME
from tokenspeed.structured import pool

DOCS = ROOT / "docs"


def told(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def test_every_package_is_in_the_table_of_layers() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = text[text.index("    7  cli") : text.index("never see each other")]
    packages = {path.parent.name for path in (ROOT / "tokenspeed").glob("*/__init__.py")}
    assert {name for name in packages if f" {name} " not in table.replace(",", " ")} == set()


def test_what_is_kept_of_grammars() -> None:
    text = told("structured-output.md")
    size = f"{pool.MAX_KEPT_CHARS >> 20} MiB"
    assert f"remembers the last {pool.MAX_KEPT}, of {size} of text in all" in text
    assert f"at most {pool.MAX_PROCESSES} of them" in text
    assert f"asked for no mask for {pool.KEEP_S / 60:g} minutes ends" in text


def test_how_long_compiling_takes_is_said_in_one_way() -> None:
    """Wherever a document says it, be it in a log that it shows."""
    texts = {path.name: told(path.name) for path in DOCS.glob("*.md")}
    names = {name for name, text in texts.items() if COMPILE_TIME in text}
    assert names >= {"getting-started.md", "launching.md", "server-flags.md"}
    for text in texts.values():
        assert text.count("minute on two idle cores") == text.count(COMPILE_TIME)
        assert "a minute or two" not in text
