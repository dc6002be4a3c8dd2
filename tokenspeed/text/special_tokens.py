"""The tokens to which a folder's tokenizer gives a role, by the names that templates use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenspeed.text.json_file import read_json

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


def special_tokens(folder: Path) -> dict[str, str]:
    """Their texts."""
    roles = read_json(folder / "special_tokens_map.json")
    roles |= read_json(folder / "tokenizer_config.json")
    texts = {name: _text(roles.get(name)) for name in _NAMES}
    return {name: text for name, text in texts.items() if text}


def end_token_id(folder: Path) -> int | None:
    """The id of "eos_token"; None if there is none, or no file says its id."""
    end = special_tokens(folder).get("eos_token")
    if end is None:
        return None
    ids = (id for text, id in _listed(folder) if text == end)
    return next((id for id in ids if type(id) is int and 0 <= id < 1 << 31), None)


def _listed(folder: Path) -> Iterator[tuple[str | None, object]]:
    """Texts and ids of tokens, from the smallest file to the largest."""
    listed = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if isinstance(listed, dict):
        known = [(id, entry) for id, entry in listed.items() if id.isdecimal() and len(id) < 12]
        yield from ((_text(entry), int(id)) for id, entry in known)
    yield from read_json(folder / "vocab.json").items()
    listed = read_json(folder / "tokenizer.json").get("added_tokens")
    if isinstance(listed, list):
        yield from ((_text(each), each.get("id")) for each in listed if isinstance(each, dict))


def _text(value: Any) -> str | None:
    """A token is spelled as text or as {"content": text, ...}."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None
