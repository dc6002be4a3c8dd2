"""Log-probabilities of a long prompt as a client has them: encoded as they came, and decoded part
by part whenever somebody goes through them. As objects they would be millions, which the garbage
collector looks at again and again, for most of a second at a time, while nothing else runs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import msgspec

from tokenspeed.engine.messages import PromptScores
from tokenspeed.request import TokenLogprob

_DECODER = msgspec.msgpack.Decoder(list[TokenLogprob | None])


class EncodedScores(Collection[TokenLogprob | None]):
    """Those `ahead` of a delta, and `last` its own."""

    def __init__(self, ahead: list[PromptScores], last: Collection[TokenLogprob | None]) -> None:
        self._ahead, self._last = ahead, last

    def __len__(self) -> int:
        return sum(part.num_entries for part in self._ahead) + len(self._last)

    def __iter__(self) -> Iterator[TokenLogprob | None]:
        for part in self._ahead:
            yield from _DECODER.decode(part.entries)
        yield from self._last

    def __contains__(self, entry: object) -> bool:
        return any(each == entry for each in self)
