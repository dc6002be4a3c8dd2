"""Grammars compiled beside the loop that serves: a few threads, a deadline, a bounded memory.

A grammar that was asked for before is there at once, with its error if it has one. The grammar
engine lets go of the interpreter while it compiles, and ends by its own limits; who waits longer
than the deadline gives up, the thread goes on.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future

from llguidance import LLMatcher

from tokenspeed.constraint import StructuredOutputs
from tokenspeed.log import logger
from tokenspeed.request import InvalidRequest
from tokenspeed.structured.grammar import compile_grammar
from tokenspeed.structured.tokens import TokenTable

THREADS = 2
STACK_BYTES = 256 << 20
"""Of address space: what is not used is not there."""
MAX_KEPT = 128
MAX_KEPT_CHARS = 1 << 20
"""Of all grammars that are kept: a large schema takes some 100 bytes of memory a character."""
MAX_WAITING = 256

_Key = tuple[str, str, bool]


def outcome(future: Future[LLMatcher]) -> LLMatcher:
    """What has been compiled. Raises InvalidRequest, each time a new one: the error is kept, and
    would gather the frames of all who raise it.
    """
    error = future.exception()
    if error is None:
        return future.result()
    if isinstance(error, InvalidRequest):
        raise InvalidRequest(str(error))
    logger.error("a grammar could not be compiled", exc_info=error)
    raise InvalidRequest(f"the grammar cannot be used: {type(error).__name__}")


class GrammarCompiler:
    """`table` is called once, by the first grammar: it loads the vocabulary. Any thread may use
    this.
    """

    def __init__(
        self,
        table: Callable[[], TokenTable],
        *,
        deadline_s: float = 30.0,
        any_whitespace: bool = True,
    ) -> None:
        self.deadline_s = deadline_s
        self._load = table
        self._any_whitespace = any_whitespace
        self._lock = threading.Lock()
        self._table: TokenTable | None = None
        self._table_lock = threading.Lock()
        self._kept: OrderedDict[_Key, Future[LLMatcher]] = OrderedDict()
        self._jobs: deque[tuple[_Key, StructuredOutputs, Future[LLMatcher]]] = deque()
        self._num_threads = 0

    @property
    def is_full(self) -> bool:
        """Whether so many grammars wait that a new one had better be asked for later."""
        return len(self._jobs) >= MAX_WAITING

    def submit(self, asked: StructuredOutputs) -> Future[LLMatcher]:
        """The matcher at the beginning of its grammar, never to be moved (`deep_copy` it), or an
        InvalidRequest. Returns at once.
        """
        any_whitespace = self._any_whitespace
        if asked.disable_any_whitespace is not None:
            any_whitespace = not asked.disable_any_whitespace
        key = (asked.kind, asked.text, any_whitespace)
        with self._lock:
            future = self._kept.get(key)
            if future is None:
                future = self._kept[key] = Future()
                future.set_running_or_notify_cancel()  # shared, so nobody's to cancel
                self._drop_oldest()
                self._jobs.append((key, asked, future))
                if self._num_threads < THREADS:
                    self._start_thread()
            self._kept.move_to_end(key)
        return future

    def compile(self, asked: StructuredOutputs) -> LLMatcher:
        """The same, waited for. Raises InvalidRequest."""
        future = self.submit(asked)
        try:
            future.exception(self.deadline_s)
        except TimeoutError:
            raise self.overrun() from None
        return outcome(future)

    def overrun(self) -> InvalidRequest:
        """What is told to those who waited for the deadline."""
        return InvalidRequest(
            f"the grammar was not compiled within {self.deadline_s:g} s "
            "(--grammar-compile-timeout-secs); make it smaller"
        )

    def _drop_oldest(self) -> None:
        """Those that are being compiled stay; there are no more of them than requests."""
        size = sum(len(text) for _, text, _ in self._kept)
        for key in [key for key, future in self._kept.items() if future.done()]:
            if len(self._kept) <= MAX_KEPT and size <= MAX_KEPT_CHARS:
                return
            size -= len(key[1])
            del self._kept[key]

    def _start_thread(self) -> None:
        before = threading.stack_size(STACK_BYTES)
        try:
            threading.Thread(target=self._work, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(before)
        self._num_threads += 1

    def _work(self) -> None:
        """A thread; it ends when nothing is left to do."""
        while True:
            with self._lock:
                if not self._jobs:
                    self._num_threads -= 1
                    return
                key, asked, future = self._jobs.popleft()
            try:
                matcher = compile_grammar(asked, self._token_table(), any_whitespace=key[2])
            except BaseException as error:  # a panic of the engine is no Exception
                future.set_exception(error)
            else:
                future.set_result(matcher)

    def _token_table(self) -> TokenTable:
        with self._table_lock:
            if self._table is None:
                self._table = self._load()
            return self._table
