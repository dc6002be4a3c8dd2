"""Ids to text, one token at a time.

Where tokens have true bytes, this is an incremental UTF-8 decoder over them: only the unfinished
tail of a character is held back (at most three bytes), U+FFFD appears only for bytes that are
really invalid, and the joined text equals `Tokenizer.decode` of all ids. Other vocabularies
(WordPiece, CTC) decode a short window of tokens anew with each push.
"""

from __future__ import annotations

import codecs
from collections.abc import Container

from tokenspeed.text.tokenizer import Tokenizer
from tokenspeed.text.vocabulary import Spelling

_utf8 = codecs.getincrementaldecoder("utf-8")
_TAIL_TOKENS = 8
_WINDOW = 6
"""Tokens of context for vocabularies whose text depends on neighbours."""


class Detokenizer:
    """The text of one sequence's generated tokens.

    The prompt decides two things: a leading space is dropped only where nothing stands before it,
    and a character that the prompt's last token left unfinished is finished by the first ones.
    `kept_ids` are special tokens that have a text even where others are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: list[int],
        skip_special_tokens: bool = True,
        kept_ids: Container[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._kept_ids = kept_ids
        shown = [id for id in prompt_ids[-_TAIL_TOKENS:] if self._is_shown(id)]
        self._at_start = not (shown or any(map(self._is_shown, prompt_ids)))
        self._decoder = _utf8("replace")
        self._owed = b"" if tokenizer.spelling is Spelling.OTHER else self._unfinished(shown)
        self._window = shown[-_WINDOW:]
        self._given = self._decode_window()

    def push_all(self, ids: list[int]) -> list[str]:
        """What `push` gives for each of them. Most tokens are whole characters."""
        if self._is_between_characters:
            texts = [*map(self._tokenizer.whole_texts.__getitem__, ids)]
            if None not in texts:
                return texts  # type: ignore[return-value]
        return [self.push(id) for id in ids]

    @property
    def _is_between_characters(self) -> bool:
        """Whether nothing that came before has a say in the next token's text."""
        drops_space = self._at_start and self._tokenizer.drops_leading_space
        return not (self._owed or drops_space or self._decoder.getstate()[0])

    def push(self, id: int) -> str:
        """The text that this token completes; "" while a character is unfinished."""
        if not self._is_shown(id):
            return ""
        if self._tokenizer.spelling is Spelling.OTHER:
            return self._push_window(id)
        data = self._tokenizer.token_bytes(id)
        if not data:
            return ""
        if self._at_start and self._tokenizer.drops_leading_space:
            data = data.removeprefix(b" ")
        self._at_start = False
        if self._owed and data:
            data = self._pay(data)
        return self._decoder.decode(data)

    def finish(self) -> str:
        """What is still held back: U+FFFD for a character that never got its last bytes."""
        if self._tokenizer.spelling is Spelling.OTHER:
            return self._decode_window()[len(self._given) :]
        return self._decoder.decode(b"", final=True)

    def _is_shown(self, id: int) -> bool:
        return not (self._skip and self._tokenizer.is_special(id)) or id in self._kept_ids

    def _unfinished(self, shown: list[int]) -> bytes:
        """Bytes of a character begun at the end of the prompt."""
        decoder = _utf8("replace")
        decoder.decode(b"".join(map(self._tokenizer.token_bytes, shown)))
        return decoder.getstate()[0]

    def _pay(self, data: bytes) -> bytes:
        """Put the prompt's unfinished bytes in front if `data` goes on with that character."""
        owed, self._owed = self._owed, b""
        try:
            _utf8("strict").decode(owed + data[:1])
        except UnicodeDecodeError:
            return data
        return owed + data

    def _decode_window(self) -> str:
        if self._tokenizer.spelling is not Spelling.OTHER:
            return ""
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _push_window(self, id: int) -> str:
        self._window.append(id)
        text = self._decode_window()
        if text.endswith("\ufffd"):
            return ""
        new = text[len(self._given) :]
        self._window = self._window[-_WINDOW:]
        self._given = self._decode_window()
        return new
