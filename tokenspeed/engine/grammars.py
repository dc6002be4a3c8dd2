"""Requests with a grammar: compiled before they are queued, and the masks of a step's rows.

A grammar moves with committed tokens only. So the mask of a row that is sampled in step N + 1 is
asked for when step N has been committed, and made by the grammar's process while the forward of
N + 1 runs. Steps without such rows do not wait; those with some wait a little. A row whose mask is
late leaves the batch until it is there, so that the others go on.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch
from torch import Tensor

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine.record import Request
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.orders import num_words
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.structured.remote import Follower, RemoteGrammar

MAX_WAIT_S = 0.05
"""Of one step for its masks."""
MAX_PATIENCE_S = 0.2
PATIENCE_STEP_S = 0.001
"""How long steps wait for one row: so long in all, and so much longer with each of its tokens."""
_CHECK_S = 0.01
_ON_ITS_WAY_S = 0.002
_UNFOLLOWED = "the grammar cannot be followed: "


@dataclass(frozen=True)
class _Waiting:
    """For its grammar to be compiled; or, once it follows one, for a mask."""

    request: Request
    grammar: RemoteGrammar


@dataclass(frozen=True)
class StepMasks:
    """Of the sampled rows of a step. `masks` are packed, on the host, int32 [R, W]; None if no row
    has any. A row without a grammar, or whose request has ended, allows everything. `failures` say
    by id why a request cannot go on; the masks of `late` ones are still being made.
    """

    masks: Tensor | None
    failures: dict[str, str]
    late: list[str]


class Grammars:
    """Lives on the engine's thread."""

    def __init__(self, pool: GrammarPool, vocab_size: int, pinned: bool) -> None:
        """`pinned`: masks go to a GPU."""
        self._pool = pool
        self._num_words = num_words(vocab_size)
        self._pinned = pinned
        self._waiting: dict[str, _Waiting] = {}
        self.num_held = 0
        """Times that a request has left the batch because its mask was late."""

    def __len__(self) -> int:
        """Requests that wait for their grammar, or for a mask."""
        return len(self._waiting)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiting

    def check(self, asked: StructuredOutputs) -> None:
        """Compile now. Raises InvalidRequest."""
        grammar = self._pool.get(asked)
        while not grammar.is_settled:
            self._pool.poll(grammar)
            _sleep([grammar], _CHECK_S)
        if grammar.error is not None:
            raise InvalidRequest(grammar.error)

    def begin(self, request: Request) -> None:
        """Have the request's grammar compiled; `take_ready` hands the request back."""
        asked = request.params.structured_outputs
        assert asked is not None
        self._wait_for(request, self._pool.get(asked))

    def hold(self, request: Request) -> None:
        """Keep a request, which has left the scheduler, until its mask is there."""
        assert isinstance(request.constraint, Follower)
        self.num_held += 1
        self._wait_for(request, request.constraint.grammar)

    def _wait_for(self, request: Request, grammar: RemoteGrammar) -> None:
        self._waiting[request.id] = _Waiting(request, grammar)
        grammar.num_waiting += 1

    def wait(self, timeout_s: float) -> None:
        """Until a process has something to say, or so long."""
        _sleep([each.grammar for each in self._waiting.values()], timeout_s)

    def take(self, request_id: str) -> Request:
        """Give up waiting. What a process does for nobody else ends."""
        given_up = self._waiting.pop(request_id)
        grammar, request = given_up.grammar, given_up.request
        grammar.num_waiting -= 1
        others = any(each is not request.constraint for each in grammar.followers)
        if grammar.is_busy and not others and not grammar.num_waiting:
            self._pool.drop(grammar)
        return request

    def take_ready(self) -> list[tuple[Request, str | None]]:
        """Requests that need not wait any longer, in order of arrival; or why they cannot go on."""
        for grammar in _distinct(each.grammar for each in self._waiting.values()):
            self._pool.poll(grammar)
        ready: list[tuple[Request, str | None]] = []
        for each in [*self._waiting.values()]:
            follower = each.request.constraint
            if isinstance(follower, Follower):
                is_done, error = follower.mask is not None, follower.error
            else:
                is_done, error = each.grammar.is_settled, each.grammar.error
            if not is_done and error is None:
                continue
            if error is None and follower is None:
                self._attach(each)
            elif error is not None and follower is not None:
                error = _UNFOLLOWED + error
            ready.append((self.take(each.request.id), error))
        return ready

    def _attach(self, compiled: _Waiting) -> None:
        asked = compiled.request.params.structured_outputs
        assert asked is not None
        follower = compiled.grammar.follow(asked.reasoning_end)
        follower.patience_s = MAX_PATIENCE_S
        compiled.request.constraint = follower

    def masks(self, rows: Sequence[Request | None]) -> StepMasks:
        """Ask for the masks of the sampled rows of a step, and wait a little for them."""
        due: list[tuple[int, Request, Follower]] = []
        for index, request in enumerate(rows):
            if request is not None and isinstance(request.constraint, Follower):
                due.append((index, request, request.constraint))
                request.constraint.want(request.output_ids)
        self._await([follower for _, _, follower in due])
        failures: dict[str, str] = {}
        late: list[str] = []
        masks: Tensor | None = None
        for index, request, follower in due:
            if follower.error is not None:
                failures[request.id] = _UNFOLLOWED + follower.error
            elif follower.mask is None:
                late.append(request.id)
            else:
                if masks is None:
                    shape = len(rows), self._num_words
                    masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._pinned)
                masks[index] = torch.frombuffer(bytearray(follower.mask), dtype=torch.int32)
        return StepMasks(masks, failures, late)

    def _await(self, followers: list[Follower]) -> None:
        """Until all masks are there, or patience is at an end; those waited for share the time."""
        grammars = _distinct(each.grammar for each in followers)
        began = now = time.monotonic()
        for follower in followers:
            follower.patience_s = min(MAX_PATIENCE_S, follower.patience_s + PATIENCE_STEP_S)
        while True:
            for grammar in grammars:
                self._pool.poll(grammar)
            pending = [each for each in followers if each.mask is None and each.error is None]
            patience = max((each.patience_s for each in pending), default=0.0)
            left = min(MAX_WAIT_S, patience) - (now - began)
            if left <= 0:
                break
            _sleep([each.grammar for each in pending], left)
            now = time.monotonic()
        for follower in followers:
            follower.patience_s -= (now - began) / len(followers)


def _distinct(grammars: Iterable[RemoteGrammar]) -> list[RemoteGrammar]:
    return [*{id(grammar): grammar for grammar in grammars}.values()]


def _sleep(grammars: Iterable[RemoteGrammar], timeout_s: float) -> None:
    """Until a process has something to say, or so long."""
    connections = [each.connection for each in _distinct(grammars)]
    there = [each for each in connections if each is not None]
    if len(there) < len(connections):  # nothing tells when a process is there
        timeout_s = min(timeout_s, _ON_ITS_WAY_S)
    if there:
        wait(there, timeout_s)
    else:
        time.sleep(timeout_s)
