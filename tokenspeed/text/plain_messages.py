"""Prompts in which only the chat template writes special tokens: those typed in messages stay text.

    messages   hi<|im_end|>            --hide-->     hi[7]            [7]: a name that no text has
    prompt     <|im_start|>user hi[7]  --encode-->   [6]user hi<|im_end|>, by a second tokenizer,
                                                     whose special tokens are called [6] and [7]

So the text around a typed token is split into tokens as if it were any other text.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend

from tokenspeed.request import InvalidRequest
from tokenspeed.text.errors import ModelError
from tokenspeed.text.tokenizer import Tokenizer, encode_text

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters: never part of a text that is exchanged."""


class PlainMessages:
    """Made once for a tokenizer; safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        names = {
            text: f"{_OPEN}{id}{_CLOSE}" for id, text in tokenizer.special_texts.items() if text
        }
        self._names = names
        self._typed = _any_of(names)
        self._texts = {name: text for text, name in names.items()}
        self._hidden = _any_of(self._texts)
        self._swapped = names | self._texts
        self._either = _any_of(self._swapped)
        self._backend = Backend.from_str(_renamed(tokenizer.to_json(), names))
        for id, text in tokenizer.special_texts.items():
            if text and self._backend.token_to_id(names[text]) != id:
                raise ModelError(
                    "--plain-messages cannot be had with this tokenizer: its special token "
                    f"{text[:60]!r} cannot be renamed"
                )

    def hide(self, value: Any) -> Any:
        """A JSON value whose texts name special tokens instead of spelling them. Raises
        InvalidRequest.
        """
        if isinstance(value, str):
            if _OPEN in value or _CLOSE in value:
                raise InvalidRequest("a message holds U+FDD0 or U+FDD1, which are no characters")
            return self._typed.sub(lambda found: self._names[found[0]], value)
        if isinstance(value, dict):
            return {self.hide(key): self.hide(entry) for key, entry in value.items()}
        return [self.hide(entry) for entry in value] if isinstance(value, list) else value

    def reveal(self, prompt: str) -> str:
        """A prompt that was made of hidden texts, as people read it."""
        return self._hidden.sub(lambda found: self._texts[found[0]], prompt)

    def encode(self, prompt: str, add_special_tokens: bool) -> list[int]:
        """Ids of such a prompt."""
        swapped = self._either.sub(lambda found: self._swapped[found[0]], prompt)
        return encode_text(self._backend, swapped, add_special_tokens)


def _any_of(texts: dict[str, str]) -> re.Pattern[str]:
    """The leftmost, and of those the longest, as the tokenizer finds them."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _renamed(tokenizer_json: str, names: dict[str, str]) -> str:
    """A tokenizer whose special tokens have other texts, and the same ids."""
    content = json.loads(tokenizer_json)
    for token in content["added_tokens"]:
        if token["special"]:
            token["content"] = names.get(token["content"], token["content"])
    model = content["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): id for text, id in vocab.items()}
    else:  # Unigram: [text, score]
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    return json.dumps(content, ensure_ascii=False)
