"""The help pages, written from the options and the table of known flags."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping, Sequence

from tokenspeed.cli.environment import ENVIRONMENT
from tokenspeed.cli.flags import known_flags, negative
from tokenspeed.config import GROUPS
from tokenspeed.options import ConfigError, Option, Settings, options_of, suggest
from tokenspeed.peers.answers import Granted, Known, Refused, Same
from tokenspeed.peers.table import TABLE

_INDENT = 30
_MAX_LISTED = 70
"""Characters of values that a page names; the help of one option has them all."""
COMMON = {
    "--config FILE": "YAML file of option names and values; the command line wins over it",
    "--print-config": "print the settings that are not as by default, with where each comes from, "
    "and stop; --print-config=all: every setting",
    "--help": "this page; --help=OPTION explains one, --help=compat lists other engines' flags",
}
"""Flags of every command that takes options, with their texts."""


def wanted(argv: Sequence[str]) -> str | None:
    """What help is asked for: "" for the page, else what stands after `--help=`; None for none."""
    for word in argv:
        if word == "--":
            return None
        if word in ("-h", "--help"):
            return ""
        if word.startswith("--help="):
            return word.removeprefix("--help=")
    return None


def page(
    head: str,
    options: Sequence[Option],
    own: Mapping[str, str],
    topic: str,
    *,
    common: bool = True,
    groups: Iterable[type[Settings]] = tuple(GROUPS.values()),
) -> str:
    """The help of a command. `head` opens it, `own` are its own flags with their texts; its options
    stand in these groups. `common`: whether it takes what all commands of a model take.
    """
    if topic == "compat" and common:
        return compat()
    if topic:
        return explain(topic, options, own, common=common)
    parts = [textwrap.dedent(head).strip("\n")]
    chosen = {option.name for option in options}
    for settings in groups:
        found = rows(each for each in options_of(settings) if each.name in chosen)
        if found:
            parts.append(_section((settings.__doc__ or "").strip().splitlines()[0], found))
    flags = {**own, **(COMMON if common else {})}
    if flags:
        parts.append(_section("This command", flags))
    return "\n\n".join(parts)


def rows(options: Iterable[Option]) -> dict[str, str]:
    """Each option's names with its text, as a page lists them."""
    return {_names(each): _text(each) for each in options}


def explain(
    topic: str, options: Sequence[Option], own: Mapping[str, str] = COMMON, *, common: bool = True
) -> str:
    """All that is known about one flag, with or without its dashes. `own` are the command's own
    flags, under all their names, with their texts.
    """
    flag = topic.replace("_", "-")
    flag = flag if flag.startswith("-") else f"--{flag}"
    texts = {
        name.partition(" ")[0]: f"{text}\n\n  {'flag':14} {names}"
        for names, text in {**own, **(COMMON if common else {})}.items()
        for name in names.split(", ")
    }
    by_flag = {name: option for option in options for name in (option.flag, *option.aliases)}
    by_flag |= {negative(option.flag): option for option in options if option.kind is bool}
    known = known_flags() if common else {}
    if flag in texts:
        return texts[flag]
    if flag in by_flag:
        return _explain_option(by_flag[flag], common)
    if flag in known:
        return "\n".join(_compat_row(known[flag][0]))
    near = suggest(flag, [*texts, *by_flag, *known])
    raise ConfigError(f"no option {topic[:100]}{near or '; --help lists them all'}")


def compat() -> str:
    """The table of flags that other engines' users type, under its three answers."""
    parts = [
        "Flags of vLLM, SGLang and earlier TokenSpeed that are no options here, and what becomes of"
        "\neach: same as (another spelling), granted (what is done instead), refused (why, and what"
        "\nworks). Every option that `tokenspeed serve --help` lists works as it says there."
    ]
    for heading, rows in TABLE.items():
        lines = [line for row in rows for line in _compat_row(row)]
        parts.append("\n".join([heading, *(f"  {line}" for line in lines)]))
    return "\n\n".join(parts)


def _compat_row(row: Known) -> list[str]:
    match row.answer:
        case Same(words=words, why=why):
            answer = f"same as {' '.join(words)}" + (f"; {why}" if why else "")
        case Granted(why=why):
            answer = f"granted: {why}"
        case Refused(why=why):
            granted = f"granted with {', '.join(row.values)}, else " if row.values else ""
            answer = f"{granted}refused: {why}"
    indent = " " * 4
    lines = textwrap.wrap(
        answer, _width() - 2, initial_indent=indent, subsequent_indent=indent + "  "
    )
    return [", ".join(row.names), *lines]


def _explain_option(option: Option, common: bool) -> str:
    facts = {
        "flag": _names(option),
        "values": allowed(option),
        "suffixes": "4k is 4000, 4K is 4096; m, M, g, G likewise" if option.suffixes else "",
        "default": default(option),
        "environment": ENVIRONMENT + option.name.upper() if common else "",
        "settings file": option.name if common else "",
    }
    lines = [f"  {fact:14} {text}" for fact, text in facts.items() if text]
    return "\n".join([option.help, "", *lines])


def _names(option: Option) -> str:
    names = [option.flag, *option.aliases]
    if option.kind is bool:
        return "--[no-]" + option.flag.removeprefix("--")
    return f"{', '.join(names)} {_metavar(option)}"


def _metavar(option: Option) -> str:
    if option.choices:
        listed = "|".join(str(choice) for choice in option.choices)
        return listed if len(listed) <= _MAX_LISTED else "NAME"
    name = {int: "N", float: "X"}.get(option.kind, "TEXT")
    return f"{name} ..." if option.is_list else name


def allowed(option: Option) -> str:
    """Its values or bounds; nothing where any text will do."""
    if option.choices:
        return ", ".join(str(choice) for choice in option.choices)
    return f"{option.low} to {option.high}" if option.low is not None else ""


def default(option: Option) -> str:
    """As people would write it."""
    if option.default is None or option.is_list:
        return "settled at start" if "default" in option.help else "none"
    if isinstance(option.default, bool):
        return "on" if option.default else "off"
    if option.suffixes and option.default and option.default % (1 << 20) == 0:
        return f"{option.default >> 20}M"
    return str(option.default)


def _text(option: Option) -> str:
    is_told = option.default is None or option.is_list or "default" in option.help
    return option.help if is_told else f"{option.help} [{default(option)}]"


def _section(title: str, rows: Mapping[str, str]) -> str:
    lines = [title.rstrip(".")]
    for names, text in rows.items():
        wrapped = textwrap.wrap(text, max(_width() - _INDENT, 20))
        if len(names) + 4 > _INDENT:
            lines.append(f"  {names}")
            lines += [" " * _INDENT + line for line in wrapped]
        else:
            first, *more = wrapped or [""]
            lines.append(f"  {names:{_INDENT - 2}}{first}")
            lines += [" " * _INDENT + line for line in more]
    return "\n".join(lines)


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, 60), 100)
