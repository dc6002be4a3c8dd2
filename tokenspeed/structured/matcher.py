"""The place of one sequence in its grammar, and the masks over the vocabulary that follow from it.

Masks are packed as `orders.py` says.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from tokenspeed.structured.grammar import plain

Words = NDArray[np.int32]


class GrammarState:
    """Moves with the tokens that are taken. Before `reasoning_end` has been seen everything is
    allowed except to end.
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

    @property
    def error(self) -> str | None:
        """Why this grammar cannot be followed any further."""
        error = self.matcher.get_error()
        return plain(error) if error else None

    def take(self, tokens: Sequence[int]) -> str | None:
        """Move on by `tokens`. The reason, if that cannot be."""
        accepted = self._advance(tokens)
        if accepted < len(tokens):
            return self.error or f"token {tokens[accepted]} is not in the grammar"
        return self.error

    def _advance(self, tokens: Sequence[int]) -> int:
        """How many of `tokens`, in order, the grammar accepts; it has then moved past these."""
        count = 0
        while count < len(tokens) and self._is_thinking:
            self._thoughts = [*self._thoughts, tokens[count]][-len(self._reasoning_end) :]
            self._is_thinking = self._thoughts != self._reasoning_end
            count += 1
        rest = list(tokens[count:])
        length = next((i for i, token in enumerate(rest) if token in self._eos_ids), len(rest))
        if rest and not self._is_ended:
            accepted = self.matcher.try_consume_tokens(rest[:length])
            self._is_ended = accepted == length < len(rest) and self.matcher.is_accepting()
            count += accepted + self._is_ended
        return count

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
