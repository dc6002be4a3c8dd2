"""The logger of all processes."""

from __future__ import annotations

import logging
import re
import sys

logger = logging.getLogger("tokenspeed")


_ROUTINE = re.compile(r"\d\d:\d\d:\d\d (?:DEBUG|INFO) ")


def setup_logging(level: str = "info", name: str = "") -> None:
    """Log to stderr, a line a record. Called once a process, by its entry point. `name` tells its
    lines from those of others of its kind.
    """
    mark = f"{name}: " if name else ""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)s {mark}%(message)s",
        datefmt="%H:%M:%S",
    )


def is_routine(line: str) -> bool:
    """Whether a line of such a log is a record that tells of no trouble."""
    return _ROUTINE.match(line) is not None
