"""The place of one sequence in its grammar, and the masks over the vocabulary that follow from it.

A mask is packed: bit i % 32 of word i // 32 says whether token i is allowed. Words are int32, rows
of ceil(V / 32) of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from tokenspeed.structured.grammar import plain

Words = NDArray[np.int32]


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


class GrammarState:
    """Moves with tokens that are taken for good (`take`) or for a look ahead (`advance`, and back
    again with `rollback`). Before `reasoning_end` has been seen everything is allowed except to
    end.
    """

    def __init__(
        self, matcher: LLMatcher, eos_ids: frozenset[int], reasoning_end: tuple[int, ...] = ()
    ) -> None:
        self.matcher = matcher.deep_copy()
        self._eos_ids = sorted(eos_ids)
        self._reasoning_end = list(reasoning_end)
        self._thoughts: list[int] = []
        self._is_thinking = bool(reasoning_end)
        self._is_ended = False
        self._num_tokens = 0

    @property
    def error(self) -> str | None:
        """Why this grammar cannot be followed any further."""
        error = self.matcher.get_error()
        return plain(error) if error else None

    @property
    def may_end(self) -> bool:
        return not self._is_thinking and self.matcher.is_accepting()

    def take(self, tokens: Sequence[int]) -> str | None:
        """Move on by `tokens`, for good. The reason, if that cannot be."""
        accepted = self.advance(tokens)
        if accepted < len(tokens):
            return self.error or f"token {tokens[accepted]} is not in the grammar"
        return self.error

    def advance(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, in order, the grammar accepts; it has then moved past these."""
        count = 0
        while count < len(tokens) and self._is_thinking:
            self._thoughts.append(tokens[count])
            self._is_thinking = self._thoughts[-len(self._reasoning_end) :] != self._reasoning_end
            count += 1
        rest = list(tokens[count:])
        length = next((i for i, token in enumerate(rest) if token in self._eos_ids), len(rest))
        if rest and not self._is_ended:
            accepted = self.matcher.try_consume_tokens(rest[:length])
            self._is_ended = accepted == length < len(rest) and self.matcher.is_accepting()
            count += accepted + self._is_ended
        self._num_tokens += count
        return count

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        assert 0 <= count <= self._num_tokens, f"{count} of {self._num_tokens} tokens taken back"
        in_grammar = min(count, self._num_tokens - len(self._thoughts))
        self._num_tokens -= count
        if count > in_grammar:
            del self._thoughts[self._num_tokens :]
            self._is_thinking = True
        if in_grammar and self._is_ended:
            self._is_ended = False
            in_grammar -= 1
        self.matcher.rollback(in_grammar)

    def fill(self, words: Words) -> None:
        """Write the mask of the next token. Behind an end, or after an error, it allows nothing but
        an end.
        """
        if self._is_thinking:
            words.fill(-1)
            bits = words.view(np.uint32)
            for token in self._eos_ids:
                bits[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
        else:
            self.matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)

    def fill_ahead(self, masks: Words, draft: Sequence[int]) -> int:
        """Write the mask of the next token and of those behind each token of `draft`, into
        `masks` [len(draft) + 1, W]. Returns how many of the draft the grammar accepts: rows behind
        these are left as they are. The state stays where it is.
        """
        self.fill(masks[0])
        accepted = 0
        for index, token in enumerate(draft):
            if not self.advance([token]):
                break
            accepted += 1
            self.fill(masks[index + 1])
        self.rollback(accepted)
        return accepted
