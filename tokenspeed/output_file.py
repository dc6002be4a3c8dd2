"""A file that a command writes when its work is done: whether it can is asked before the work."""

from __future__ import annotations

import os
from pathlib import Path

from tokenspeed.options import ConfigError


def check_target(flag: str, path: str | Path) -> None:
    """Raise ConfigError if no file can be written there: before a minute of work, not after it."""
    target = Path(path).absolute()
    folder = target.parent
    if not folder.is_dir():
        raise ConfigError(f"{flag} {path}: there is no folder {folder}")
    if target.is_dir():
        raise ConfigError(f"{flag} {path}: this is a folder; name a file")
    changed = target if target.exists() else folder
    if not os.access(changed, os.W_OK):
        raise ConfigError(f"{flag} {path}: {changed} cannot be written")
