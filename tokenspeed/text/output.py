"""From the engine's deltas to what a user sees: text, stop strings, and ids and logprobs cut alike.

One `OutputText` follows one sequence, in the server and in `LLM`. The result does not depend on how
many tokens a delta holds.
"""

from __future__ import annotations

from collections.abc import Collection, Container

import msgspec

from tokenspeed.request import FinishReason, GenerateRequest, RequestDelta, TokenLogprob
from tokenspeed.text.detokenizer import Detokenizer
from tokenspeed.text.stop import StopMatcher
from tokenspeed.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, kw_only=True):
    """What one delta adds for the user. `token_ids` are those up to the end, including an
    end-of-sequence id and the tokens of a stop string; `text` shows neither unless asked to.

    `stop_reason` is the stop string or the one of `stop_token_ids` that ended it, None for an
    end-of-sequence id. `must_abort`: a stop string ended it while the engine still runs, so the
    caller has to abort the request there.
    """

    text: str = ""
    texts: list[str] = []
    """What each token added to it, and behind these, what the end did."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    must_abort: bool = False


class OutputText:
    """The visible output of one sequence. Without a tokenizer there is no text, only ids.

    `kept_ids`: special tokens that are not skipped, since whoever reads the text looks for them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        request: GenerateRequest,
        kept_ids: Container[int] = (),
    ) -> None:
        params = request.params
        self._params = params
        self._num_tokens = 0
        self._is_done = False
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._detokenizer = (
            Detokenizer(tokenizer, request.prompt_ids, params.skip_special_tokens, kept_ids)
            if tokenizer is not None
            else None
        )

    def push(self, delta: RequestDelta) -> TextDelta:
        """Take one engine delta; after the end, later ones add nothing."""
        if self._is_done:
            return TextDelta()
        pieces, matched = self._cut(self._texts(delta))
        taken = len(pieces)
        ended = delta.finish_reason is not None
        if ended and matched is None:
            piece, matched = self._flush()
            pieces.append(piece)
        self._is_done = ended or matched is not None
        return TextDelta(
            text="".join(pieces),
            texts=pieces,
            token_ids=delta.token_ids[:taken],
            logprobs=None if delta.logprobs is None else delta.logprobs[:taken],
            finish_reason=delta.finish_reason if matched is None else FinishReason.STOP,
            stop_reason=self._stop_id(delta) if matched is None else matched,
            must_abort=matched is not None and not ended,
        )

    def _texts(self, delta: RequestDelta) -> list[str]:
        """The text of each token."""
        ids, end = delta.token_ids, delta.stop_token
        if self._detokenizer is None:
            return [""] * len(ids)
        if end is not None and ids[-1:] == [end] and self._hides(end):
            return [*self._detokenizer.push_all(ids[:-1]), ""]
        return self._detokenizer.push_all(ids)

    def _cut(self, texts: list[str]) -> tuple[list[str], str | None]:
        """What each may show, up to the one that completes a stop string; and that string."""
        if not self._params.stop:
            return texts, None
        pieces = []
        for text in texts:
            self._num_tokens += 1
            piece, matched = self._match(text)
            pieces.append(piece)
            if matched is not None:
                return pieces, matched
        return pieces, None

    def _match(self, text: str) -> tuple[str, str | None]:
        """Stop strings count only in text that came after the first `min_tokens` tokens."""
        if self._num_tokens <= self._params.min_tokens:
            return text, None
        return self._matcher.push(text)

    def _hides(self, id: int) -> bool:
        """Whether the text of the id that ended the sequence is left out."""
        if id in self._params.stop_token_ids:
            return not self._params.include_stop_str_in_output
        return self._params.skip_special_tokens

    def _flush(self) -> tuple[str, str | None]:
        """The end came from the engine: give out what was held back."""
        if self._detokenizer is None:
            return "", None
        text, matched = self._match(self._detokenizer.finish())
        return text + self._matcher.finish(), matched

    def _stop_id(self, delta: RequestDelta) -> int | None:
        return delta.stop_token if delta.stop_token in self._params.stop_token_ids else None


class Sample:
    """One sequence as far as it has come: its deltas, joined."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: Collection[TokenLogprob | None] | None = None
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._texts)

    def push(self, new: TextDelta, delta: RequestDelta) -> None:
        """Take what `delta` added, and `new` shows of it; after the end, later ones add nothing."""
        if self.finish_reason is not None:
            return
        self._texts.append(new.text)
        self.token_ids += new.token_ids
        self.logprobs += new.logprobs or []
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.finish_reason, self.stop_reason = new.finish_reason, new.stop_reason
        self.error = delta.error
