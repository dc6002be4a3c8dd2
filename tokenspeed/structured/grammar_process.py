"""The process of one grammar, from its fork on: compile, then follow sequences and make masks.

It works through what it is asked in order and counts what is done on the board, so that whoever has
to end it knows at which sequence it was. It ends when its connection does, or when it is asked
nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import numpy as np
from llguidance import LLMatcher

from tokenspeed.request import InvalidRequest
from tokenspeed.structured.grammar import compile_grammar
from tokenspeed.structured.matcher import GrammarState
from tokenspeed.structured.orders import (
    HEADER_BYTES,
    LAST,
    Ask,
    Job,
    Place,
    Told,
    Verdict,
    num_words,
)
from tokenspeed.structured.tokens import TokenTable

_PR_SET_PDEATHSIG = 1
"""Of Linux's prctl."""

STACK_BYTES = 256 << 20
"""Of address space: what is not used is not there."""
MEMORY_BYTES = 1 << 30
"""That a grammar may take, beside what was there when its process was forked."""


def follow(connection: Connection, job_file: int, board_file: int, table: TokenTable | str) -> None:
    """Serve one grammar until nobody asks any more. `table` may be why there is none."""
    job = msgspec.msgpack.decode(os.pread(job_file, os.fstat(job_file).st_size, 0), type=Job)
    os.close(job_file)
    try:
        if isinstance(table, str):
            raise InvalidRequest(table)
        matcher = compile_grammar(job.asked, table, any_whitespace=job.any_whitespace)
    except InvalidRequest as error:
        verdict = str(error)
    except BaseException as error:  # a panic of the engine is no Exception
        verdict = f"the grammar cannot be used: {type(error).__name__}"
    else:
        connection.send_bytes(msgspec.msgpack.encode(Verdict("")))
        _MaskMaker(matcher, table, board_file).serve(connection, LAST * job.keep_s)
        return
    connection.send_bytes(msgspec.msgpack.encode(Verdict(verdict)))


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, however that goes."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before
        os._exit(0)


class _MaskMaker:
    def __init__(self, matcher: LLMatcher, table: TokenTable, board_file: int) -> None:
        self._matcher = matcher
        self._eos_ids = frozenset(table.eos_ids)
        board = mmap.mmap(board_file, 0)
        words = num_words(table.vocab_size)
        self._done = np.frombuffer(board, np.int32, 1)
        self._masks = np.frombuffer(board, np.int32, offset=HEADER_BYTES).reshape(-1, words)
        self._states: dict[int, GrammarState] = {}

    def serve(self, connection: Connection, last_s: float) -> None:
        """Until the connection ends, or nothing is asked for `last_s`."""
        decoder = msgspec.msgpack.Decoder(Ask)
        while connection.poll(last_s):
            try:
                ask = decoder.decode(connection.recv_bytes())
            except EOFError:
                return
            connection.send_bytes(msgspec.msgpack.encode(self._answer(ask)))

    def _answer(self, ask: Ask) -> Told:
        told = Told([], [])
        for number in ask.ended:
            self._states.pop(number, None)
        for row, place in enumerate(ask.places):
            self._done[0] = row
            began = time.perf_counter()
            told.errors.append(self._fill(place, row) or "")
            told.seconds.append(time.perf_counter() - began)
        return told

    def _fill(self, place: Place, row: int) -> str | None:
        state = self._states.get(place.sequence)
        if state is None:
            state = GrammarState(self._matcher, self._eos_ids, place.reasoning_end)
            self._states[place.sequence] = state
        error = state.take(place.tokens)
        if error is None:
            state.fill(self._masks[row])
            error = state.error
        return error


def limit_memory() -> None:
    """What this process may take from now on: beyond it, it ends."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + STACK_BYTES + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def run_deep(function: Callable[[], None]) -> None:
    """Run where the grammar engine may recurse: as deep as a grammar is long."""
    before = threading.stack_size(STACK_BYTES)
    try:
        thread = threading.Thread(target=function)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
