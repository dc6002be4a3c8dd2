"""Requests with a grammar: compiled before they are queued, and the masks of a step's rows.

A grammar moves with committed tokens only. So the mask of a row that is sampled in step N + 1 is
made when step N has been committed, while the forward of N + 1 runs; steps without such rows do
not wait.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass

import torch
from llguidance import LLMatcher
from torch import Tensor

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine.pinned import send
from tokenspeed.request import InvalidRequest, Request
from tokenspeed.structured.compiler import GrammarCompiler, outcome
from tokenspeed.structured.matcher import GrammarState, MaskFiller, num_words


@dataclass(frozen=True)
class _Compiling:
    request: Request
    future: futures.Future[LLMatcher]
    deadline: float


class Grammars:
    """Lives on the engine's thread; only the compiler has threads of its own."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_ids: frozenset[int], pinned: bool
    ) -> None:
        """`pinned`: masks go to a GPU."""
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._eos_ids = eos_ids
        self._pinned = pinned
        self._compiling: dict[str, _Compiling] = {}
        self._filler = MaskFiller()

    def __len__(self) -> int:
        """Requests that wait for their grammar."""
        return len(self._compiling)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._compiling

    def check(self, asked: StructuredOutputs) -> None:
        """Compile now. Raises InvalidRequest."""
        self._compiler.compile(asked)

    def begin(self, request: Request) -> None:
        """Have the request's grammar compiled; `take_ready` hands the request back."""
        asked = request.params.structured_outputs
        assert asked is not None
        deadline = time.monotonic() + self._compiler.deadline_s
        self._compiling[request.id] = _Compiling(request, self._compiler.submit(asked), deadline)

    def wait(self, timeout_s: float) -> None:
        """Until a grammar has been compiled, or so long."""
        waiting = [each.future for each in self._compiling.values()]
        futures.wait(waiting, timeout_s, futures.FIRST_COMPLETED)

    def take(self, request_id: str) -> Request:
        """Give up waiting for a grammar."""
        return self._compiling.pop(request_id).request

    def take_ready(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammar is there now, in order of arrival; or why it will not be."""
        if not self._compiling:
            return []
        now = time.monotonic()
        done = [
            each for each in self._compiling.values() if each.future.done() or now >= each.deadline
        ]
        return [(self.take(each.request.id), self._attach(each)) for each in done]

    def _attach(self, compiled: _Compiling) -> str | None:
        request = compiled.request
        asked = request.params.structured_outputs
        assert asked is not None
        try:
            if not compiled.future.done():
                raise self._compiler.overrun()
            matcher = outcome(compiled.future)
        except InvalidRequest as error:
            return str(error)
        request.constraint = GrammarState(matcher, self._eos_ids, asked.reasoning_end)
        return None

    def masks(self, rows: Sequence[Request | None]) -> tuple[Tensor | None, dict[str, str]]:
        """Packed masks on the host, int32 [R, W], of the sampled rows of a step; None if no row has
        a grammar. A row of a request that has ended (None) or is free allows everything. And by id,
        why a request cannot go on.
        """
        states: list[tuple[int, GrammarState]] = []
        failures: dict[str, str] = {}
        for index, request in enumerate(rows):
            if request is None or not isinstance(request.constraint, GrammarState):
                continue
            error = request.constraint.sync(request.output_ids)
            if error is None:
                states.append((index, request.constraint))
            else:
                failures[request.id] = f"the grammar cannot be followed: {error}"
        if not states:
            return None, failures
        shape = len(rows), num_words(self._vocab_size)
        masks = torch.full(shape, -1, dtype=torch.int32, pin_memory=self._pinned)
        self._filler.fill(states, masks.numpy())
        for index, state in states:
            if error := state.error:
                request = rows[index]
                assert request is not None
                failures[request.id] = f"the grammar cannot be followed: {error}"
        return masks, failures


def unpack(masks: Tensor, logits: Tensor) -> Tensor:
    """Bool [R, V] beside `logits` [R, V], true where a token is allowed, from packed words on the
    host (int32 [R, W]).
    """
    octets = masks.to(logits.device, non_blocking=True).view(torch.uint8)  # little-endian all over
    allowed = _octet_table(logits.device).index_select(0, octets.flatten().int())
    return allowed.view(torch.bool).view(len(masks), -1)[:, : logits.shape[1]]


@functools.cache
def _octet_table(device: torch.device) -> Tensor:
    """Eight bools for each value of eight bits, as one int64: [256]."""
    bits = [[value >> bit & 1 for bit in range(8)] for value in range(256)]
    return send(bits, device, torch.uint8).view(torch.int64).flatten()
