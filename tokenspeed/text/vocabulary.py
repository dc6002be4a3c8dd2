"""What a token's bytes are: the inverse of how a vocabulary spells them.

Three spellings exist. *Byte-level* vocabularies write each byte as one printable character (GPT-2's
table). *Metaspace* vocabularies write text, a space as U+2581 and, where they have byte fallback, a
single byte as <0xNN>; their decoder drops one leading space of the whole text. Everything else
(WordPiece, CTC) has no bytes of its own: a token's text depends on its neighbours.
"""

from __future__ import annotations

import enum
import functools
import json
import re
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as Backend

_SPACE = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Spelling(enum.Enum):
    BYTE_LEVEL = "byte level"
    METASPACE = "metaspace"
    OTHER = "other"


class Vocabulary:
    """Ids, texts and bytes of one `tokenizers.Tokenizer`. `size` is the highest id plus one."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}
        self.whole_texts: Mapping[int, str | None] = _WholeTexts(self)
        self._added: dict[int, str] = {id: token.content for id, token in added.items()}
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        self.size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        steps = _decoder_steps(backend)
        kinds = {step["type"] for step in steps}
        self._has_byte_tokens = "ByteFallback" in kinds
        self.drops_leading_space = any(_drops_leading_space(step) for step in steps)
        if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
            self.spelling = Spelling.BYTE_LEVEL
        elif kinds and kinds <= _METASPACE_STEPS and all(map(_is_plain, steps)):
            self.spelling = Spelling.METASPACE
        else:
            self.spelling = Spelling.OTHER

    def token_text(self, id: int) -> str:
        """The token as the vocabulary spells it; "" for an id without a token (padding rows)."""
        return self._backend.id_to_token(id) or "" if 0 <= id < self.size else ""

    def token_bytes(self, id: int) -> bytes:
        """The token's true bytes, which may be part of a character; b"" without a token."""
        found = self._bytes.get(id)
        if found is None:
            found = self._bytes[id] = self._spelled_bytes(id)
        return found

    def whole_text(self, id: int) -> str | None:
        """What the token adds behind whole characters, whatever stands around it; None where that
        is not certain: it is special, or has only a part of a character.
        """
        if id in self.special_ids or self.spelling is Spelling.OTHER:
            return None
        try:
            return self.token_bytes(id).decode()
        except UnicodeDecodeError:
            return None

    def _spelled_bytes(self, id: int) -> bytes:
        if id in self._added:
            return self._added[id].encode()
        token = self.token_text(id)
        if self.spelling is Spelling.BYTE_LEVEL:
            return _from_byte_level(token)
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        if self.spelling is Spelling.METASPACE:
            return token.replace(_SPACE, " ").encode()
        return token.encode()


class _WholeTexts(dict[int, str | None]):
    """`Vocabulary.whole_text`, looked up without a call."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __missing__(self, id: int) -> str | None:
        found = self[id] = self._vocabulary.whole_text(id)
        return found


def _decoder_steps(backend: Backend) -> list[dict[str, Any]]:
    if backend.decoder is None:
        return []
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return steps


def _drops_leading_space(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return bool(step.get("prepend_scheme") != "never")
    return bool(step["type"] == "Strip" and step.get("start") == 1)


def _is_plain(step: dict[str, Any]) -> bool:
    """Whether a step is one that `token_bytes` and `drops_leading_space` account for."""
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": _SPACE} and step["content"] == " ")
    if step["type"] == "Strip":
        return bool(step["content"] == " " and step["start"] in (0, 1) and step["stop"] == 0)
    return bool(step.get("replacement", _SPACE) == _SPACE)


def _from_byte_level(token: str) -> bytes:
    table = _byte_table()
    try:
        return bytes(table[character] for character in token)
    except KeyError:  # a character outside the table stands for itself, as in the Rust decoder
        return token.encode()


@functools.cache
def _byte_table() -> dict[str, int]:
    """GPT-2's spelling: printable Latin-1 stands for itself, the other 68 bytes for U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(0x100 + i): byte for i, byte in enumerate(others)}
