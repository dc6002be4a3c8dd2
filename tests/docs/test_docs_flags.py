"""The pages of flags, which are written from the source, are those that it writes now."""

from __future__ import annotations

from pathlib import Path

import pytest
from code_in_documents import ROOT

from tokenspeed.cli.flag_pages import PAGES, main
from tokenspeed.cli.flags import known_flags
from tokenspeed.config import OPTIONS
from tokenspeed.peers.table import PEER_VALUES

MAKE = "it is not current: python -m tokenspeed.cli.flag_pages docs"


@pytest.mark.parametrize("name", PAGES)
def test_a_written_page_is_current(name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == PAGES[name](), MAKE


def test_every_flag_has_a_row() -> None:
    options, compatible = (page() for page in PAGES.values())
    for option in OPTIONS.values():
        assert all(f"`{name}`" in options for name in (option.flag, *option.aliases))
    rows = [name for name, (_, is_on) in known_flags().items() if is_on]
    assert all(f"`{name}`" in compatible for name in rows)
    assert all(f" {theirs}` |" in compatible for _, theirs in PEER_VALUES)


def test_tables_are_tables() -> None:
    """As many cells in each row as in its head."""
    for page in PAGES.values():
        for table in page().split("\n## ")[1:]:
            rows = [line for line in table.splitlines() if line.startswith("|")]
            counts = {line.replace("\\|", "").count("|") for line in rows}
            assert len(rows) > 2 and len(counts) == 1


def test_pages_are_written_where_one_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == PAGES.keys()
    assert main([]) == 2
    assert "usage: " in capsys.readouterr().err
