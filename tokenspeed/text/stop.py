"""Stop strings, found in a stream of text pieces whatever their cut.

A match is the first one to be complete, reading character by character; of two that end together
the longer one. So the answer never depends on how the text was cut, and nothing that could still
become a stop string is given out.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Emits text up to the first stop string (with it, if `include`), holding back only the longest
    end that could be the beginning of one.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._automata = [_Automaton(stop) for stop in stops if stop]
        self._include = include
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Text to emit now, and the stop string that ended it. After a match nothing comes."""
        if self._matched is not None:
            return "", self._matched
        if not self._automata:
            return text, None
        known = len(self._held)
        text = self._held + text
        for position in range(known, len(text)):
            if stop := self._step(text[position]):
                self._matched, self._held = stop, ""
                end = position + 1
                return text[: end if self._include else end - len(stop)], stop
        # With `include` everything up to a match is emitted, so there is nothing to hold back.
        keep = 0 if self._include else max(automaton.length for automaton in self._automata)
        cut = len(text) - keep
        self._held = text[cut:]
        return text[:cut], None

    def finish(self) -> str:
        """The held-back text, which turned out not to be a stop string."""
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        """Advance all automata by one character; the longest stop string that it completes."""
        complete = [automaton.stop for automaton in self._automata if automaton.step(character)]
        return max(complete, key=len, default=None)


class _Automaton:
    """Knuth-Morris-Pratt: `length` is that of the longest beginning of `stop` the text ends with.

    One step is constant time on average, so a long list of long stop strings cannot slow a stream.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def step(self, character: str) -> bool:
        """Whether this character completes the stop string."""
        length, stop = self.length, self.stop
        while length and stop[length] != character:
            length = self._fallback[length - 1]
        self.length = length + (stop[length] == character)
        return self.length == len(stop)
