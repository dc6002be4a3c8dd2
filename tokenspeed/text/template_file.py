"""Where chat templates are: in a model folder, in the order transformers looks; in a file that the
operator names; and in this package, under names of their own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenspeed.text.errors import ModelError
from tokenspeed.text.json_file import read_json

MAX_TEMPLATE_BYTES = 1 << 20
_DEFAULT = "default"

SHIPPED = {"hermes": Path(__file__).with_name("templates") / "hermes.jinja"}
"""Templates of this package: hermes has a place for tools, for models that speak ChatML."""


def read_template(folder: Path, tokenizer_config: dict[str, Any]) -> str | None:
    """chat_template.jinja, else chat_template.json, else tokenizer_config.json's chat_template (a
    text, or a list of named ones whose "default" is taken). None for a base model.
    """
    file = folder / "chat_template.jinja"
    if file.is_file():
        return read_template_file(file)
    for settings in (read_json(folder / "chat_template.json"), tokenizer_config):
        template = _default(settings.get("chat_template"), folder)
        if template is not None:
            return template
    return None


def named_template(name: str) -> str:
    """What --chat-template gives: a template of this package, or a file."""
    return read_template_file(SHIPPED.get(name) or Path(name))


def read_template_file(path: Path) -> str:
    """A template in a file of its own."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_TEMPLATE_BYTES + 1)
        text = raw.decode("utf-8")
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path}: not UTF-8 text, so not a chat template") from None
    if len(raw) > MAX_TEMPLATE_BYTES:
        raise ModelError(f"{path}: a chat template has at most {MAX_TEMPLATE_BYTES >> 20} MiB")
    return text


def _default(value: Any, folder: Path) -> str | None:
    if isinstance(value, list):
        named = {
            entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)
        }
        value = named.get(_DEFAULT)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{folder}: chat_template must be text, not a {type(value).__name__}")
    return value
