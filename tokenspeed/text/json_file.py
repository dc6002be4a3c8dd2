"""Small JSON files of a model folder, read with a size limit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenspeed.text.errors import ModelError

MAX_JSON_BYTES = 64 << 20
"""tokenizer_config.json with thousands of added tokens is about 1 MB."""


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; {} if there is no such file."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_JSON_BYTES + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise ModelError(f"{path}: larger than {MAX_JSON_BYTES >> 20} MiB")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}; fetch the file again") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value
