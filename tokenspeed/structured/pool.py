"""The grammars that are known, each once, and how many of them may have a process."""

from __future__ import annotations

from collections import OrderedDict

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.structured.host import GrammarHost
from tokenspeed.structured.orders import Job
from tokenspeed.structured.remote import RemoteGrammar

MAX_PROCESSES = 64
MAX_KEPT = 32
"""Grammars that nobody uses at the moment. The process of one takes some megabytes."""
KEEP_S = 300.0
"""How long a process lives that is asked nothing. What came of it is remembered."""
MAX_KEPT_CHARS = 1 << 20

_Key = tuple[str, str, bool]


class GrammarPool:
    """`deadline_s` is what compiling may take. Those who wait for a grammar count themselves in its
    `num_waiting`.
    """

    def __init__(
        self, host: GrammarHost, *, deadline_s: float = 30.0, any_whitespace: bool = True
    ) -> None:
        self.deadline_s = deadline_s
        self._host = host
        self._any_whitespace = any_whitespace
        self._kept: OrderedDict[_Key, RemoteGrammar] = OrderedDict()

    def get(self, asked: StructuredOutputs) -> RemoteGrammar:
        """The grammar of what is asked; to be polled until it is settled."""
        any_whitespace = self._any_whitespace
        if asked.disable_any_whitespace is not None:
            any_whitespace = not asked.disable_any_whitespace
        key = (asked.kind, asked.text, any_whitespace)
        for each in self._kept.values():
            each.end_if_idle()
        grammar = self._kept.get(key)
        if grammar is not None and grammar.is_overdue:
            self.drop(grammar)
            grammar = None
        if grammar is None:
            self._drop_oldest()
            job = Job(asked=asked, any_whitespace=any_whitespace, keep_s=KEEP_S)
            grammar = self._kept[key] = RemoteGrammar(self._host, job, self.deadline_s)
        self._kept.move_to_end(key)
        return grammar

    def poll(self, grammar: RemoteGrammar) -> None:
        """Take in what its process has said; begin one if there is none and there may be one."""
        may_open = grammar.is_alive or self._make_room()
        grammar.poll(may_open)

    @property
    def num_waiting(self) -> int:
        return sum(grammar.num_waiting for grammar in self._kept.values())

    def release(self, grammar: RemoteGrammar) -> None:
        """End the process of a grammar that is not to be followed; what came of it is kept."""
        if grammar.is_settled and not grammar.is_overdue:
            grammar.close()
        else:
            self.drop(grammar)

    def drop(self, grammar: RemoteGrammar) -> None:
        """Forget a grammar, and end what its process does."""
        grammar.close()
        for key in [key for key, kept in self._kept.items() if kept is grammar]:
            del self._kept[key]

    def _make_room(self) -> bool:
        """For one more process, if need be that of one that nobody uses."""
        alive = [grammar for grammar in self._kept.values() if grammar.is_alive]
        if len(alive) < MAX_PROCESSES:
            return True
        unused = [grammar for grammar in alive if not grammar.is_used]
        for grammar in unused[:1]:
            self.drop(grammar)
        return bool(unused)

    def _drop_oldest(self) -> None:
        unused = [grammar for grammar in self._kept.values() if not grammar.is_used]
        size = sum(len(grammar.job.asked.text) for grammar in unused)
        for index, grammar in enumerate(unused):
            if len(unused) - index <= MAX_KEPT and size <= MAX_KEPT_CHARS:
                return
            size -= len(grammar.job.asked.text)
            self.drop(grammar)
