"""Code as documents show it: blocks and inline code of Markdown, and the commands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_INLINE = re.compile(r"`([^`\n]+)`")
_COMMAND = re.compile(
    r"(?:^ *|&& )(?:\$ )?(?:[A-Z_]+=\S+ )*(?:[\w./-]+/)?(?:tokenspeed|ts)"
    r"((?:(?: | *\\\n *)[^\s|&;<>#\\]+)+)(?:[^\n]*\n *tokenspeed: error: ([^\n]*))?",
    re.MULTILINE,
)
_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str) -> Iterator[str]:
    """Code blocks: fenced, or indented by four blanks after an empty line."""
    fenced = re.compile(r"^```[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    yield from fenced.findall(text)
    rest = fenced.sub("", text)
    yield from re.findall(r"(?:^|\n\n)((?:    [^\n]*(?:\n|$)|\n(?=    ))+)", rest)


def inline(text: str) -> Iterator[str]:
    for block in blocks(text):
        text = text.replace(block, "")
    yield from _INLINE.findall(re.sub(r"(`[^`\n]*)\n\s*([^`\n]*`)", r"\1 \2", text))


def commands(text: str) -> Iterator[tuple[list[str], str]]:
    """The words after each `tokenspeed` that begins a command, and the error that is shown below,
    if any. What two blanks part is no word.
    """
    for found in _COMMAND.finditer(text):
        yield found[1].replace("\\\n", " ").split(), found[2] or ""


def flags(text: str) -> set[str]:
    return {found[0] for found in _FLAG.finditer(text)}
