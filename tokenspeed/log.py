"""The logger of all processes."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tokenspeed")


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
