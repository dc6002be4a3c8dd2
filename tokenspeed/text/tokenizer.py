"""Text to ids and back, for every model alike, over the `tokenizers` library.

A tokenizer comes from a folder's tokenizer.json or from a GGUF's vocabulary; only where neither
exists is transformers asked (slow_tokenizer.py). Decoding goes through true bytes, so that a
stream, a whole answer and a token's logprob entry always agree.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from tokenspeed.request import InvalidRequest
from tokenspeed.text.errors import ModelError
from tokenspeed.text.gguf import Gguf, read_gguf
from tokenspeed.text.gguf_tokenizer import build_tokenizer, special_token_ids
from tokenspeed.text.json_file import read_json
from tokenspeed.text.slow_tokenizer import convert_slow_tokenizer
from tokenspeed.text.source import ModelSource, eos_token_ids, locate
from tokenspeed.text.special_tokens import special_tokens
from tokenspeed.text.template_file import read_template
from tokenspeed.text.unicode import is_unicode
from tokenspeed.text.vocabulary import Spelling, Vocabulary

MAX_TOKENIZER_BYTES = 512 << 20


class Tokenizer:
    """One model's tokenizer. Safe to share between threads: nothing changes after it is built.

    `special_tokens` maps the names templates use ("bos_token", ...) to token texts. `spelling` and
    `drops_leading_space` tell the detokenizer how tokens join.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: dict[str, str] | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        chat_template: str | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.special_tokens = special_tokens or {}
        _mark_special(backend, list(self.special_tokens.values()))
        self._backend = backend
        self._vocabulary = Vocabulary(backend)
        self.vocab_size = self._vocabulary.size
        self.spelling: Spelling = self._vocabulary.spelling
        self.drops_leading_space = self._vocabulary.drops_leading_space
        self.whole_texts = self._vocabulary.whole_texts
        self.chat_template = chat_template
        self.eos_token_ids = eos_token_ids

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; with special tokens, what the model expects around it (usually a BOS)."""
        return encode_text(self._backend, text, add_special_tokens)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of ids. Ids outside the vocabulary have no text; invalid bytes give U+FFFD."""
        if skip_special_tokens:
            ids = [id for id in ids if not self.is_special(id)]
        if self.spelling is Spelling.OTHER:
            known = [id for id in ids if 0 <= id < self.vocab_size]
            text: str = self._backend.decode(known, skip_special_tokens=False)
            return text
        data = b"".join(map(self.token_bytes, ids))
        if self.drops_leading_space:
            data = data.removeprefix(b" ")
        return data.decode("utf-8", errors="replace")

    def token_bytes(self, id: int) -> bytes:
        """The token's true bytes: joined over all ids they are the text's UTF-8."""
        return self._vocabulary.token_bytes(id)

    @property
    def special_texts(self) -> dict[int, str]:
        """Texts of the special tokens, by id."""
        return {id: self._vocabulary.token_text(id) for id in self._vocabulary.special_ids}

    def to_json(self) -> str:
        """The library's own form (tokenizer.json)."""
        text: str = self._backend.to_str()
        return text

    def is_special(self, id: int) -> bool:
        return id in self._vocabulary.special_ids

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of those of `texts` that are special tokens."""
        ids = map(self._backend.token_to_id, texts)
        return frozenset(id for id in ids if id is not None and self.is_special(id))


def encode_text(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """Ids of a text. Raises InvalidRequest for what is not Unicode."""
    if not is_unicode(text):
        raise InvalidRequest("the text holds a lone surrogate, which is not valid Unicode")
    # A batch of one: unlike `encode`, it lets other threads run meanwhile.
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
    ids: list[int] = encoding.ids
    return ids


def load_tokenizer(source: ModelSource, override: str | None = None) -> Tokenizer:
    """The tokenizer of a model, or of `override` (a folder, GGUF file or hub id) in its place."""
    path = source.path if override is None else locate(override, need_weights=False)
    if path.is_file():
        return _from_gguf(read_gguf(path), source)
    return _from_folder(path, source)


def _from_gguf(gguf: Gguf, source: ModelSource) -> Tokenizer:
    backend = build_tokenizer(gguf)
    named = {
        name: text
        for name, id in special_token_ids(gguf).items()
        if (text := backend.id_to_token(id))
    }
    return Tokenizer(
        backend,
        special_tokens=named,
        eos_token_ids=eos_token_ids(source),
        chat_template=gguf.text("tokenizer.chat_template", "") or None,
    )


def _from_folder(folder: Path, source: ModelSource) -> Tokenizer:
    settings = read_json(folder / "tokenizer_config.json")
    backend = _read_backend(folder)
    _add_missing_tokens(backend, settings, folder)
    return Tokenizer(
        backend,
        special_tokens=special_tokens(folder),
        eos_token_ids=eos_token_ids(source),
        chat_template=read_template(folder, settings),
    )


def _read_backend(folder: Path) -> Backend:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return convert_slow_tokenizer(folder)
    if file.stat().st_size > MAX_TOKENIZER_BYTES:
        raise ModelError(f"{file}: larger than {MAX_TOKENIZER_BYTES >> 20} MiB")
    try:
        return Backend.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception
        raise ModelError(f"{file}: not a usable tokenizer: {error}") from None


def _add_missing_tokens(backend: Backend, settings: dict[str, Any], folder: Path) -> None:
    """Tokens that only tokenizer_config.json knows, at the ids it says."""
    listed = settings.get("added_tokens_decoder", {})
    if not isinstance(listed, dict):
        raise ModelError(f"{folder}: added_tokens_decoder in tokenizer_config.json is no object")
    fields = ("single_word", "lstrip", "rstrip", "normalized", "special")
    for key, entry in sorted(listed.items(), key=lambda item: (len(item[0]), item[0])):
        if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise ModelError(f"{folder}: added token {key!r} in tokenizer_config.json has no text")
        text = entry["content"]
        if backend.token_to_id(text) is None:
            flags = {name: bool(entry[name]) for name in fields if name in entry}
            backend.add_tokens([AddedToken(text, **flags)])
            if str(backend.token_to_id(text)) != key:
                raise ModelError(f"{folder}: added token {text!r} cannot stand at id {key}")


def _mark_special(backend: Backend, texts: list[str]) -> None:
    """A token with a special role is special even if tokenizer.json lists it as plain."""
    added = backend.get_added_tokens_decoder().values()
    special = {token.content for token in added if token.special}
    wanted = [
        text for text in texts if text not in special and backend.token_to_id(text) is not None
    ]
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in wanted])
