"""A grammar and the sequences that follow it, as their server sees them: each grammar in a process
of its own, that can be ended whatever it does.

    compiling --> following --(too slow, too large, gone)--> compiling --> following
        `--> unusable <------------ too often --------------'

Where a process has to be ended, the sequence it was at ends with it. The others begin again in a
new one: a sequence's place is a function of the grammar and its tokens.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection

import msgspec

from tokenspeed.request import InvalidRequest
from tokenspeed.structured.host import GrammarHost, Link
from tokenspeed.structured.orders import ROWS, Ask, Job, Place, Told, Verdict

MASK_BUDGET_S = 5.0
"""What all masks of a sequence may take, beside `MASK_SHARE_S` for each of its tokens."""
MASK_SHARE_S = 0.005
MAX_ATTEMPTS = 3
"""Processes of one grammar, one after the other."""
_SLOW_S = 1.0
_TOO_LARGE = "it takes more memory than a grammar may, or broke the grammar engine; make it smaller"


class RemoteGrammar:
    """Nothing happens by itself: `poll` takes in what the process has said, and sends what is to be
    done. `error` is why the grammar cannot be used; `is_overdue`: for now. `num_waiting` is kept by
    those who wait for it to be compiled, which may take `deadline_s`.
    """

    def __init__(self, host: GrammarHost, job: Job, deadline_s: float) -> None:
        self.job = job
        self.error: str | None = None
        self.is_overdue = False
        self.num_waiting = 0
        self.followers: weakref.WeakSet[Follower] = weakref.WeakSet()
        self._host = host
        self._deadline_s = deadline_s
        self._link: Link | None = None
        self._is_compiled = False
        self._is_slow = False
        self._began_at = time.monotonic()
        self._num_opened = 0
        self._numbers = itertools.count()
        self._outbox: list[Follower] = []
        self._asked: list[Follower] = []
        self._ended: list[int] = []
        self._at = 0
        self._at_since = 0.0
        """When the process was last given something to do, or had done a part of it."""

    @property
    def is_settled(self) -> bool:
        """Whether it has been compiled, or cannot be."""
        return self._is_compiled or self.error is not None

    @property
    def connection(self) -> Connection | None:
        return None if self._link is None else self._link.connection

    @property
    def is_alive(self) -> bool:
        return self._link is not None

    @property
    def is_busy(self) -> bool:
        return self.is_alive and (bool(self._asked) or not self._is_compiled)

    @property
    def is_used(self) -> bool:
        return self.num_waiting > 0 or bool(self.followers)

    def follow(self, reasoning_end: tuple[int, ...]) -> Follower:
        """A sequence at the beginning."""
        follower = Follower(self, next(self._numbers), reasoning_end)
        self.followers.add(follower)
        weakref.finalize(follower, self._ended.append, follower.number)
        return follower

    def want(self, follower: Follower) -> None:
        """Have the mask of `follower` made."""
        self._outbox.append(follower)

    def poll(self, may_open: bool = True) -> None:
        """`may_open`: whether there may be another process."""
        self.end_if_idle()
        if self.error is None and self._link is None and may_open:
            self._open()
        if self.error is None and not self._is_compiled:
            self._look_at_deadline()
        try:
            while self._link is not None and self._link.connection.poll():
                self._take(self._link, self._link.connection.recv_bytes())
            if self._link is not None:
                self._look_after(self._link)
                self._ask(self._link)
        except (EOFError, OSError):
            self._end(_TOO_LARGE)

    def close(self) -> None:
        """End the process; `poll` would begin a new one."""
        link, self._link = self._link, None
        if link is not None:
            self._host.kill(link)

    def end_if_idle(self) -> None:
        """End a process that was asked nothing for `keep_s`; the next question begins a new one."""
        idle_s = time.monotonic() - self._at_since
        if not self.is_alive or self.is_busy or idle_s < self.job.keep_s:
            return
        self.close()
        self._num_opened = 0
        for follower in self.followers:
            follower.begin_again()

    def _open(self) -> None:
        self._at_since = time.monotonic()
        if self._is_compiled:  # before
            self._began_at = self._at_since
        self._is_compiled = self._is_slow = False
        try:
            self._link = self._host.open(self.job)
        except InvalidRequest as error:
            self.error = str(error)
        self._num_opened += self._link is not None

    def _look_at_deadline(self) -> None:
        took = time.monotonic() - self._began_at
        if took > self._deadline_s:
            self.is_overdue = True
            self.error = (
                f"the grammar was not compiled within {self._deadline_s:g} s "
                "(--grammar-compile-timeout-secs); make it smaller"
            )
            self.close()
        elif took > _SLOW_S and self._link is not None:
            self._slow(self._link)

    def _slow(self, link: Link) -> None:
        """Let all others go first from now on."""
        if not self._is_slow:
            self._host.slow(link)
            self._is_slow = True

    def _take(self, link: Link, data: bytes) -> None:
        if not self._is_compiled:
            self.error = msgspec.msgpack.decode(data, type=Verdict).error or None
            self._is_compiled = self.error is None
            if self.error is not None:
                self.close()
            return
        told = msgspec.msgpack.decode(data, type=Told)
        asked, self._asked = self._asked, []
        for row, follower in enumerate(asked):
            follower.take(link.mask(row), told.errors[row], told.seconds[row])

    def _ask(self, link: Link) -> None:
        if not self._is_compiled or self._asked or not self._outbox:
            return
        self._asked, self._outbox = self._outbox[:ROWS], self._outbox[ROWS:]
        ended, self._ended[:] = self._ended[:], []
        ask = Ask([follower.place() for follower in self._asked], ended)
        link.board[:4] = bytes(4)
        self._at, self._at_since = 0, time.monotonic()
        link.connection.send_bytes(msgspec.msgpack.encode(ask))

    def _look_after(self, link: Link) -> None:
        """End a process that is at one sequence for too long."""
        if not self._asked:
            return
        now = time.monotonic()
        if link.num_done != self._at:
            self._at, self._at_since = link.num_done, now
        took = now - self._at_since
        if took > _SLOW_S:
            self._slow(link)
        if took > self._asked[self._at].budget_s:
            self._end(_too_slow())

    def _end(self, reason: str) -> None:
        """The process is of no use any more, because of what it was at."""
        at = self._link.num_done if self._link is not None else 0
        self.close()
        asked, self._asked = self._asked, []
        if not self._is_compiled or self._num_opened >= MAX_ATTEMPTS:
            self.error = reason
            return
        self._is_compiled, self._began_at = False, time.monotonic()
        if asked:
            asked.pop(at).error = reason
        self._outbox = asked + self._outbox
        for follower in self.followers:
            follower.begin_again()


class Follower:
    """One sequence under a grammar. `patience_s` is how long steps may still wait for it."""

    def __init__(self, grammar: RemoteGrammar, number: int, reasoning_end: tuple[int, ...]) -> None:
        self.grammar = grammar
        self.number = number
        self.patience_s = 0.0
        self._reasoning_end = reasoning_end
        self._error: str | None = None
        self._output_ids: Sequence[int] = ()
        self._num_sent = 0
        self._num_masked = -1
        self._is_wanted = False
        self._mask = b""
        self._spent_s = 0.0

    @property
    def error(self) -> str | None:
        """Why this sequence cannot go on."""
        return self._error or self.grammar.error

    @error.setter
    def error(self, reason: str) -> None:
        self._error = reason

    @property
    def budget_s(self) -> float:
        """What is left for the next mask."""
        return MASK_BUDGET_S + MASK_SHARE_S * len(self._output_ids) - self._spent_s

    @property
    def mask(self) -> bytes | None:
        """Packed words of the mask behind the output that was last wanted, once it is there."""
        return None if self._is_wanted else self._mask

    def want(self, output_ids: Sequence[int]) -> None:
        """Have the mask behind `output_ids` made, which begin with those wanted before."""
        if not self._is_wanted and self._num_masked != len(output_ids):
            self._output_ids, self._is_wanted = output_ids, True
            self.grammar.want(self)

    def place(self) -> Place:
        new = list(self._output_ids[self._num_sent :])
        self._num_sent += len(new)
        return Place(self.number, new, self._reasoning_end)

    def take(self, mask: bytes, error: str, seconds: float) -> None:
        self._mask, self._is_wanted, self._num_masked = mask, False, self._num_sent
        self._spent_s += seconds
        if error:
            self._error = error
        elif self.budget_s < 0:
            self._error = _too_slow()

    def begin_again(self) -> None:
        self._num_sent = 0


def _too_slow() -> str:
    return (
        f"its masks took more than {MASK_BUDGET_S:g} s: it is ambiguous, or too large; "
        "make it simpler"
    )
