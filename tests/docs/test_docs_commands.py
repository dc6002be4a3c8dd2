"""Documents: command lines that work as they stand, flags that exist, links that lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_in_documents import DOCUMENTS, ROOT, blocks, commands, flags, inline, name_of

from tokenspeed.cli import batch, bench_offline, bench_serve, bench_startup, cache, explain, warmup
from tokenspeed.cli.flags import Command, Flags
from tokenspeed.cli.main import COMMANDS, main
from tokenspeed.cli.settings import SERVE
from tokenspeed.options import ConfigError, options_of

PARSED: dict[str, Command] = {
    "serve": SERVE,
    "batch": batch.COMMAND,
    "warmup": warmup.COMMAND,
    "explain": explain.COMMAND,
    "bench serve": bench_serve.COMMAND,
    "bench startup": bench_startup.COMMAND,
    **{
        f"bench {name}": bench_offline._command({each.flag: each for each in options_of(kind)})
        for name, kind in bench_offline._KINDS.items()
    },
    **{f"cache {name}": action.command for name, action in cache.ACTIONS.items()},
}
"""Those that take flags."""

FOREIGN = {"--error-exitcode", "--tool", "--init", "--stop-timeout", "--build-arg"}
"""Flags in documents of other programs than ours."""


def check(words: list[str]) -> None:
    """Raise ConfigError unless the command line can be taken, as far as its words go."""
    topics = [word for word in words if word == "--help" or word.startswith("--help=")]
    if topics or words[0] in ("help", "version", "env", "--help"):
        if not any(word.partition("=")[2].isupper() for word in topics):  # --help=OPTION
            assert main(words) == 0, f"tokenspeed {' '.join(words)}"
        return
    two = " ".join(words[:2])
    if two in PARSED or words[0] in PARSED:
        name = two if two in PARSED else words[0]
        Flags(PARSED[name]).read(words[len(name.split()) :])
    elif words[0] not in COMMANDS or len(words) > 1:
        raise ConfigError(f"tokenspeed {' '.join(words)} is no command")


def commands_in(path: Path) -> Iterator[tuple[list[str], str]]:
    text = path.read_text()
    for code in blocks(text):
        yield from commands(code)
    for code in inline(text):
        if code.startswith(("tokenspeed ", "ts ")):
            yield from commands(code)
        elif code.partition(" ")[0] in COMMANDS and " -" in code:
            yield code.split(), ""


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_commands_can_be_taken(path: Path) -> None:
    """Or are refused in the words that the document shows."""
    for words, error in commands_in(path):
        said = ""
        try:
            check(words)
        except ConfigError as refusal:
            said = f"{words[0]}: {refusal}"
        assert said == error, f"tokenspeed {' '.join(words)}"


def test_commands_are_found() -> None:
    code = "    $ x/tokenspeed serve m \\\n        --port 1   and a text\n    ts env | head\n"
    text = f"a\n\n{code}\nb `ts c`"
    assert list(commands(next(blocks(text)))) == [
        (["serve", "m", "--port", "1"], ""),
        (["env"], ""),
    ]
    assert list(inline(text)) == ["ts c"]
    assert list(commands("X=1 ts a && b/ts c")) == [(["a"], ""), (["c"], "")]
    assert list(commands("$ ts a  # b\ntokenspeed: error: no")) == [(["a"], "no")]
    assert not list(commands("useradd tokenspeed -m\nfrom tokenspeed import LLM\n/x/tokenspeed"))
    with pytest.raises(ConfigError, match="did you mean --port"):
        check(["serve", "--prot", "1"])
    with pytest.raises(ConfigError, match="no command"):
        check(["sreve", "m"])
    assert sum(len(list(commands_in(path))) for path in DOCUMENTS) > 50


def test_flags_in_documents_exist() -> None:
    """Of our commands, or of the scripts in benchmarks/ and tests/."""
    known = set(FOREIGN) | {"--help", "--version"}
    for command in PARSED.values():
        known |= Flags(command).takes.keys()
    for script in (ROOT / "benchmarks").iterdir():
        known |= flags(script.read_text()) if script.suffix in (".py", ".sh") else set()
    for document in DOCUMENTS:
        named = {
            flag.replace("_", "-")
            for code in inline(document.read_text())
            for flag in flags(code)
            if flag.startswith("--") and code.startswith("--") and flag != "--no-"
        }
        assert named <= known, name_of(document)


def anchor(heading: str) -> str:
    """What a heading's link is called on GitHub."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        name, _, place = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), link
        if place:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert place in map(anchor, headings), link


def test_the_index_has_every_document() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    for path in DOCUMENTS:
        if path.parent == ROOT / "docs" and path.name != "README.md":
            assert f"]({path.name})" in index
