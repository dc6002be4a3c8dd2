"""The logger of all processes."""

from __future__ import annotations

import logging
import sys

logger = logging.getLogger("tokenspeed")


def setup_logging(level: str = "info") -> None:
    """Log to stderr, a line a record. Called once a process, by its entry point."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
