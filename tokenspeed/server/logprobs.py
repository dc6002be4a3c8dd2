"""Log-probabilities of the engine in the forms that clients read.

A token is shown as its text; one that holds only part of a character as an escape of its bytes
("bytes:\\xf0\\x9f"), so that different tokens stay different; without a tokenizer as "token_id:7".
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence

from tokenspeed.request import TokenLogprob
from tokenspeed.server.protocol import PromptLogprob, RankedLogprob
from tokenspeed.server.protocol_chat import AlternativeLogprob, ChatLogprobs, ContentLogprob
from tokenspeed.server.protocol_completions import CompletionLogprobs
from tokenspeed.text.tokenizer import Tokenizer

MAX_AT_ONCE = 2048
"""Prompt tokens of one part of the old form: what encodes it to JSON lets nothing else run."""


def token_text(tokenizer: Tokenizer | None, token_id: int) -> tuple[str, bytes]:
    """How a token is shown, and its bytes."""
    if tokenizer is None:
        return f"token_id:{token_id}", b""
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode("utf-8"), data
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data), data


def chat_logprobs(
    tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob], num_top: int
) -> ChatLogprobs:
    """One entry a generated token, each with its `num_top` likeliest alternatives."""
    content = []
    for entry in entries:
        text, data = token_text(tokenizer, entry.token_id)
        top = []
        for token_id, logprob in entry.top[:num_top]:
            name, name_bytes = token_text(tokenizer, token_id)
            top.append(AlternativeLogprob(name, logprob, list(name_bytes)))
        content.append(ContentLogprob(text, entry.logprob, list(data), top))
    return ChatLogprobs(content)


def prompt_logprobs(
    tokenizer: Tokenizer | None, entries: Iterable[TokenLogprob | None], num_top: int
) -> list[PromptLogprob]:
    """One entry a prompt token: it and its `num_top` likeliest alternatives, by id."""
    shown: list[PromptLogprob] = []
    for entry in entries:
        if entry is None:
            shown.append(None)
            continue
        ranked = {
            str(token_id): RankedLogprob(logprob, rank, token_text(tokenizer, token_id)[0])
            for rank, (token_id, logprob) in enumerate(entry.top[:num_top], 1)
        }
        own = RankedLogprob(entry.logprob, None, token_text(tokenizer, entry.token_id)[0])
        shown.append({str(entry.token_id): ranked.pop(str(entry.token_id), own)} | ranked)
    return shown


class CompletionLogprobsWriter:
    """The old form of one choice, piece by piece: offsets go on where the last piece ended.

    `echo` is the prompt's text, if the choice begins with it.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, skip_special: bool, echo: str = ""
    ) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._skip_special = skip_special
        self._echo = echo
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def prompt(
        self, token_ids: Sequence[int], entries: Iterable[TokenLogprob | None]
    ) -> Iterator[CompletionLogprobs]:
        """The prompt's tokens, in parts. A special token counts where the text has it (it may be
        added).
        """
        shown = CompletionLogprobs([], [], [], [])
        for token_id, entry in zip(token_ids, entries, strict=True):
            if len(shown.tokens) == MAX_AT_ONCE:
                yield shown
                shown = CompletionLogprobs([], [], [], [])
            text, data = token_text(self._tokenizer, token_id)
            self._append(shown, text, entry)
            if not self._is_special(token_id) or self._echo.startswith(text, self._offset):
                self._advance(data)
        self._offset = len(self._echo)
        yield shown

    def output(self, entries: Sequence[TokenLogprob]) -> CompletionLogprobs:
        """Generated tokens."""
        shown = CompletionLogprobs([], [], [], [])
        for entry in entries:
            text, data = token_text(self._tokenizer, entry.token_id)
            self._append(shown, text, entry)
            if not (self._skip_special and self._is_special(entry.token_id)):
                self._advance(data)
        return shown

    def _append(self, shown: CompletionLogprobs, text: str, entry: TokenLogprob | None) -> None:
        shown.tokens.append(text)
        shown.text_offset.append(self._offset)
        shown.token_logprobs.append(None if entry is None else entry.logprob)
        shown.top_logprobs.append(None if entry is None else self._top(text, entry))

    def _top(self, text: str, entry: TokenLogprob) -> dict[str, float]:
        """The likeliest tokens by text, and the chosen one too, if any were asked for."""
        top: dict[str, float] = {}
        for token_id, logprob in entry.top[: self._num_top]:
            top.setdefault(token_text(self._tokenizer, token_id)[0], logprob)
        if self._num_top:
            top.setdefault(text, entry.logprob)
        return top

    def _is_special(self, token_id: int) -> bool:
        return self._tokenizer is not None and self._tokenizer.is_special(token_id)

    def _advance(self, data: bytes) -> None:
        self._offset += len(self._decoder.decode(data))
