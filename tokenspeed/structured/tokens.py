"""A model's vocabulary as the grammar engine sees it: the bytes of each token, and what ends.

Special tokens stand for no text: a grammar allows them only where it names them. Ids without a
token (the padding of a vocabulary to the model's size) are never allowed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast

from llguidance import LLTokenizer, TokenizerWrapper

from tokenspeed.request import InvalidRequest
from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.text.vocabulary import Spelling

_CUE = "\n"
"""Begins a text so that no tokenizer adds a space of its own to what follows."""


@dataclass(frozen=True)
class TokenTable:
    """`special`: the texts of special tokens with their ids."""

    tokens: LLTokenizer
    special: Mapping[str, int]
    vocab_size: int
    eos_ids: tuple[int, ...]


def token_table(tokenizer: Tokenizer, vocab_size: int, eos_ids: frozenset[int]) -> TokenTable:
    """The table of `vocab_size` ids; `eos_ids` end an output. Takes about a second where there are
    150,000 of them. Raises InvalidRequest where there can be none.
    """
    if tokenizer.spelling is Spelling.OTHER:
        raise InvalidRequest(
            "structured output is not possible with this model: its tokens are no fixed bytes"
        )
    ends = sorted(id for id in eos_ids if id < vocab_size)
    if not ends:
        raise InvalidRequest(
            "structured output is not possible with this model: it names no end-of-sequence token"
        )
    vocabulary = _Vocabulary(tokenizer, vocab_size, ends)
    special = {
        data.decode(errors="replace"): id
        for id, data in enumerate(vocabulary.tokens)
        if tokenizer.is_special(id)
    }
    tokens = LLTokenizer(cast(TokenizerWrapper, vocabulary), eos_token=ends)
    return TokenTable(tokens, special, vocab_size, tuple(ends))


class _Vocabulary:
    """The attributes that LLTokenizer reads. Called, it tokenizes text that a grammar leaves no
    choice about, so that the model is given the tokens it knows.
    """

    is_tokenizer_wrapper = True
    bos_token_id: int | None = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, ends: list[int]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = ends[0]
        self.tokens = [tokenizer.token_bytes(id) for id in range(vocab_size)]
        special = {id for id in range(vocab_size) if tokenizer.is_special(id)}
        self.special_token_ids = sorted(special | set(ends))
        self._not_text = frozenset(self.special_token_ids)
        self._by_bytes = {
            data: id for id, data in enumerate(self.tokens) if data and id not in self._not_text
        }
        self._longest = max(map(len, self._by_bytes), default=1)

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly those of `text`, none of them special."""
        for cue in ("", _CUE):
            ids = self._tokenizer.encode(cue + text, add_special_tokens=False)
            ids = self._behind(ids, cue.encode())
            if self._spell(ids) == text.encode():
                return ids
        return self._greedy(text.encode())

    def _behind(self, ids: list[int], cue: bytes) -> list[int]:
        """What follows the tokens of the cue, which may have got a space in front."""
        for count in range(len(ids) + 1) if cue else ():
            if (self._spell(ids[:count]) or b"").lstrip(b" ") == cue:
                return ids[count:]
        return ids

    def _spell(self, ids: list[int]) -> bytes | None:
        if any(id in self._not_text or id >= len(self.tokens) for id in ids):
            return None
        return b"".join(self.tokens[id] for id in ids)

    def _greedy(self, data: bytes) -> list[int]:
        """The longest token each time; bytes that no token begins with end it."""
        ids: list[int] = []
        while data:
            for size in range(min(self._longest, len(data)), 0, -1):
                if (id := self._by_bytes.get(data[:size])) is not None:
                    ids.append(id)
                    data = data[size:]
                    break
            else:
                return ids
        return ids
