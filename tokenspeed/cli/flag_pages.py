"""`python -m tokenspeed.cli.flag_pages FOLDER`: the two pages of the documents that list all flags.

    server-flags.md        every option of `serve`, from the settings classes
    compatible-flags.md    every flag of other engines that is known, from the table of answers

A test compares the pages in docs/ with what this writes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenspeed.cli.environment import ENVIRONMENT
from tokenspeed.cli.flags import negative
from tokenspeed.cli.pages import COMMON, allowed, default
from tokenspeed.config import GROUPS, OPTIONS
from tokenspeed.options import Option, options_of
from tokenspeed.peers.answers import Answer, Granted, Known, Same
from tokenspeed.peers.table import PEER_VALUES, TABLE

_WRITTEN = (
    "<!-- Written by `python -m tokenspeed.cli.flag_pages docs`: change the source instead. -->"
)

_OPTIONS_HEAD = f"""# Server flags

{_WRITTEN}

Every option of `tokenspeed serve`. `LLM(...)` takes them as keywords, less those of the HTTP face
(None: not given); `batch`, `warmup`, `explain`, `cache why`, `cache export` and `bench` take those
that concern them.

- On the command line: `--max-model-len 4k`, `--max-model-len=4k` or `--max_model_len 4k`. A switch
  is also turned off: `--no-enable-prefix-caching`. Of what is given twice the last counts; lists
  grow.
- In a settings file (`--config FILE.yaml`): `max-model-len: 4k`, an option a line.
- In the environment: `{ENVIRONMENT}MAX_MODEL_LEN=4k`; lists are separated by white space.

Files, variables and keywords have no order: two names of one option that contradict each other,
such as `max-num-seqs` and SGLang's `max-running-requests`, are an error that names both.

The command line wins over the file, the file over the environment. `--print-config` shows each
value, where it came from, and why what you left open is what it is here. Sizes take suffixes: 4k is
4000, 4K is 4096; m, M, g, G, t and T likewise. "Settled at start": from model and machine."""

_COMPAT_HEAD = f"""# Flags of vLLM, SGLang and earlier TokenSpeed

{_WRITTEN}

A command line that was made for another engine mostly works as it is. Whatever is typed gets one of
three answers, and nothing is ignored in silence:

- **works**: an option of [server-flags.md](server-flags.md), under one of its names, or another
  spelling of one, listed here as "same as";
- **granted**: taken, and done otherwise; the log of the start says how;
- **refused**: the start ends with status 2 and one line: why, and what works.

A switch that is granted because it is so anyway is refused with `--no-` before its name, and the
other way round; where both change nothing, both are granted. `tokenspeed serve --help=compat`
prints this table, `tokenspeed serve --help=FLAG` one row of it."""


def server_flags() -> str:
    """The page of options."""
    parts = [_OPTIONS_HEAD]
    for settings in GROUPS.values():
        title = (settings.__doc__ or "").strip().splitlines()[0].rstrip(".")
        rows = [_option(each) for each in options_of(settings)]
        parts.append(_table(title, ("Flag", "Values", "Default", ""), rows))
    rows = [(f"`{names}`", "", "", text) for names, text in COMMON.items()]
    parts.append(_table("This command", ("Flag", "Values", "Default", ""), rows))
    return "\n\n".join(parts) + "\n"


def compatible_flags() -> str:
    """The page of other engines' flags, and of their values for flags that are ours too."""
    parts = [_COMPAT_HEAD]
    for heading, known in TABLE.items():
        parts.append(_table(heading, ("Flag", "Answer", ""), [_known(row) for row in known]))
    rows = [
        (f"`{OPTIONS[name].flag} {theirs}`", f"`{ours}`", meaning)
        for (name, theirs), (ours, meaning) in PEER_VALUES.items()
    ]
    parts.append(_table("Values of flags that are options here", ("Typed", "Taken as", ""), rows))
    return "\n\n".join(parts) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "server-flags.md": server_flags,
    "compatible-flags.md": compatible_flags,
}


def main(argv: Sequence[str]) -> int:
    """Write the pages into the folder."""
    if len(argv) != 1:
        print("usage: python -m tokenspeed.cli.flag_pages FOLDER", file=sys.stderr)
        return 2
    for name, page in PAGES.items():
        (Path(argv[0]) / name).write_text(page())
    return 0


def _option(option: Option) -> tuple[str, ...]:
    names = [option.flag, *option.aliases]
    if option.kind is bool:
        names.append(negative(option.flag))
    kind = {int: "whole number", float: "number", bool: "", str: "text"}[option.kind]
    values = allowed(option) or kind
    shown = default(option)
    return (
        ", ".join(f"`{name}`" for name in names),
        f"list: {values}" if option.is_list else values,
        shown if option.default is None or option.is_list else f"`{shown}`",
        option.help,
    )


def _known(row: Known) -> tuple[str, ...]:
    names = ", ".join(f"`{name}`" for name in row.names)
    if row.values and not isinstance(row.answer, Same | Granted):
        values = ", ".join(f"`{value}`" for value in row.values)
        return names, f"granted with {values}, else refused", row.answer.why
    return names, _answer(row.answer), row.answer.why


def _answer(answer: Answer) -> str:
    if isinstance(answer, Same):
        return f"same as `{' '.join(answer.words)}`"
    return "granted" if isinstance(answer, Granted) else "refused"


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"## {title}", "", _row(head), "|" + "---|" * len(head)]
    return "\n".join([*lines, *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
