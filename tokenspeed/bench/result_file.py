"""The file that a measurement writes when it ends."""

from __future__ import annotations

import sys
from pathlib import Path


def write(command: str, path: Path, data: bytes) -> bool:
    """Write it; False, with a line on standard error, if that fails after all."""
    try:
        path.write_bytes(data)
    except OSError as error:
        reason = error.strerror or error
        print(f"tokenspeed: error: bench {command}: {path}: {reason}", file=sys.stderr)
        return False
    return True
