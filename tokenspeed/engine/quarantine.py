"""Write passes that are at fault into a settings file, so that no later start runs them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from tokenspeed.options import ConfigError

_MAX_BYTES = 1 << 20
_KEY = re.compile(r"^disable[-_]pass[ \t]*:.*$", re.MULTILINE)


def disable_passes(path: Path, names: Sequence[str]) -> None:
    """Add `names` to the file's `disable-pass`; the rest of it, comments too, stays. Raises
    ConfigError for a file that cannot be read or changed.
    """
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ConfigError(f"{path} is larger than {_MAX_BYTES} bytes")
        text = path.read_text(encoding="utf-8")
        changed = _changed(path, text, names)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(changed, encoding="utf-8")
        beside.chmod(path.stat().st_mode & 0o777)
        os.replace(beside, path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be changed: {error}") from error


def _changed(path: Path, text: str, names: Sequence[str]) -> str:
    before = _disabled(text)
    merged = list(dict.fromkeys([*before, *names]))
    line = f"disable-pass: [{', '.join(merged)}]"
    if _KEY.search(text):
        changed = _KEY.sub(line, text, count=1)
    else:
        changed = f"{text.rstrip()}\n{line}\n".lstrip("\n")
    try:
        is_right = _disabled(changed) == merged
    except yaml.YAMLError:
        is_right = False  # the old list went over several lines
    if not is_right:
        raise ConfigError(f"{path}: its disable-pass is not one line; write there: {line}")
    return changed


def _disabled(text: str) -> list[str]:
    entries = yaml.safe_load(text) or {}
    found = entries.get("disable-pass", entries.get("disable_pass")) or []
    return [str(each) for each in found] if isinstance(found, list) else [str(found)]
