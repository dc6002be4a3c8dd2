"""What the actions of `tokenspeed cache` want to know, out of their own flags and words.

Each public function takes them as they were given, and answers with the arguments of what does the
work. They raise ConfigError for what cannot be taken.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from tokenspeed.cli.values import from_words
from tokenspeed.options import ConfigError, Option

Own = Mapping[str, tuple[str, ...]]

WORDS = "words"
"""Where positional words stand among the own flags of an action that takes no model."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_AGE = re.compile(r"(\d{1,6})([smhdw])")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_MAX_SIZE = Option(
    name="max_size",
    kind=int,
    is_list=False,
    is_optional=False,
    default=None,
    help="",
    aliases=(),
    choices=(),
    low=0,
    high=1 << 50,
    secret=False,
    suffixes=True,
)


def as_json(own: Own) -> dict[str, Any]:
    return {"as_json": "--json" in own, **_no_words(own)}


def _no_words(own: Own) -> dict[str, Any]:
    if words := own.get(WORDS):
        raise ConfigError(f"takes no words, got {words[0][:100]!r}")
    return {}


def limits(own: Own) -> dict[str, Any]:
    _no_words(own)
    if not own.keys() & {"--older-than", "--max-size", "--all"}:
        raise ConfigError("needs --older-than AGE, --max-size SIZE or --all")
    age, size = own.get("--older-than"), own.get("--max-size")
    max_bytes = _size(size[0]) if size else None
    return {
        "max_age_s": _age(age[0]) if age else None,
        "max_bytes": 0 if "--all" in own else max_bytes,
        "is_dry": "--dry-run" in own,
    }


def _age(text: str) -> int:
    found = _AGE.fullmatch(text)
    if found is None:
        raise ConfigError(f"--older-than must be a number and s, m, h, d or w, got {text[:100]!r}")
    return int(found[1]) * _SECONDS[found[2]]


def _size(text: str) -> int:
    try:
        size: int = from_words(_MAX_SIZE, [text])
    except ConfigError as error:
        raise ConfigError(f"--max-size {error}") from None
    return size


def output(own: Own) -> dict[str, Any]:
    if not own.get("--output", ("",))[0]:
        raise ConfigError("needs --output FILE")
    return {"output": own["--output"][0]}


def archive(own: Own) -> dict[str, Any]:
    words, digest = own[WORDS], own.get("--sha256", (None,))[0]
    if len(words) != 1:
        raise ConfigError(f"takes one FILE, got {len(words)}")
    if digest is not None and not _DIGEST.fullmatch(digest):
        raise ConfigError(f"--sha256 must be 64 hexadecimal digits, got {digest[:100]!r}")
    if not os.path.isfile(words[0]):
        why = "is a folder" if os.path.isdir(words[0]) else "no such file"
        raise ConfigError(f"{words[0]}: {why}; name an archive that warmup or cache export wrote")
    if digest is None and "--trust" not in own:
        raise ConfigError(
            "an archive is code, which starts will run as you: give --sha256 DIGEST (export prints "
            "it), or --trust if you know where the file comes from"
        )
    return {"path": words[0], "sha256": digest}
