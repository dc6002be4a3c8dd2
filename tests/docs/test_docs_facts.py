"""What the documents say of the code's own tables and limits."""

from __future__ import annotations

import re

from code_in_documents import ROOT
from test_layers import LAYERS

from tokenspeed.config import COMPILE_TIME
from tokenspeed.structured import pool

DOCS = ROOT / "docs"


def told(name: str) -> str:
    return " ".join((DOCS / name).read_text().split())


def test_the_table_of_layers_is_that_of_the_imports() -> None:
    text = (DOCS / "architecture.md").read_text()
    table = text[text.index("    7  cli") : text.index("never see each other")]
    rows = re.findall(r"^    ([\d ])  (.{30})", table, re.MULTILINE)
    layers: dict[int, list[str]] = {}
    for number, names in rows:
        layer = int(number) if number.strip() else min(layers)
        layers.setdefault(layer, []).extend(re.findall(r"\w+", names))
    assert {layer: sorted(names) for layer, names in layers.items()} == {
        layer: sorted(names) for layer, names in enumerate(LAYERS)
    }


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
