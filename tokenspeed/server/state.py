"""What every handler of one server shares: the engine's client, the text side, who is being served.

A server is loading, ready, draining (no new work, running requests may end) or dead (the engine is
gone); `require_ready` is the one gate that all generation passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import time
from collections.abc import Iterator
from typing import Protocol

from tokenspeed import __version__
from tokenspeed.config import Config
from tokenspeed.engine.attached import AttachedClient
from tokenspeed.engine.messages import Ready
from tokenspeed.request import GenerateRequest
from tokenspeed.server.asgi import BodyRoom
from tokenspeed.server.errors import (
    APIError,
    bad_request,
    ended_by_operator,
    overdue,
    overloaded,
    shorten,
    unavailable,
)
from tokenspeed.server.keys import keys_of
from tokenspeed.server.metrics import Metrics
from tokenspeed.server.offload import Offload
from tokenspeed.server.protocol import FieldWarnings
from tokenspeed.server.request_stats import RequestTimer
from tokenspeed.server.sharing import Shared, alone
from tokenspeed.spans import span
from tokenspeed.structured.host import GrammarHost, vocabulary_of
from tokenspeed.structured.orders import Vocabulary
from tokenspeed.structured.pool import GrammarPool
from tokenspeed.text.text_side import TextSide

_LARGE_BODIES = 8
"""How many bodies of the largest size may be on their way in at once."""


class Stoppable(Protocol):
    @property
    def job_id(self) -> str: ...
    def fail(self, error: Exception) -> None: ...


class ServerState:
    """Lives on one event loop; nothing here is thread-safe. `shared`: what there is in common with
    the server's other HTTP processes, if there are some.

    `open` are the generations that run in the engine; `num_active` are the API requests that are
    being served, and `idle` is set while there are none.
    """

    def __init__(
        self, config: Config, client: AttachedClient, shared: Shared | None = None
    ) -> None:
        self.config = config
        self.client = client
        self.text: TextSide | None = None
        self.names = config.server.served_model_name or (config.model.model,)
        self.shared = alone(config.server) if shared is None else shared
        self.metrics = Metrics(config, self.names[0], __version__, client, self.shared)
        self.keys = keys_of(config.server)
        self.offload = Offload(deadline_s=config.server.prompt_timeout)
        self.bodies = BodyRoom(_LARGE_BODIES * config.server.max_request_bytes)
        self.field_warnings = FieldWarnings()
        self.draining = False
        self.open: set[Stoppable] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self._stopped: APIError | None = None
        self.num_active = 0
        self._has_generated = False
        # Two processes must not draw the same: a request would be answered twice in the same words.
        number, seed = self.shared.number, config.model.seed
        self._seeds = random.Random(seed if number == 0 else f"{seed}/{number}")

    @property
    def phase(self) -> str:
        """loading, ready, paused (new work is taken, and waits), stalled, draining or dead."""
        if self.client.state == "dead":
            return "dead"
        if self.draining:
            return "draining"
        if self.client.stats.is_paused:
            return "paused"
        if self.stalled_s > self.config.server.watchdog_timeout:
            return "stalled"
        return "ready" if self.client.state == "ready" and self.text is not None else "loading"

    @property
    def stalled_s(self) -> float:
        """For how long the engine has work, whoever sent it, and ends no step."""
        busy_since = self.shared.queue.busy_since
        if busy_since is None or self.client.stats.is_paused:
            return 0.0
        return time.monotonic() - max(self.client.stats_at, busy_since)

    @property
    def loading_detail(self) -> str:
        """What start-up is busy with, for people."""
        progress = self.client.progress
        return f"{progress.phase} {progress.detail}".strip() if progress else "starting"

    def require_ready(self) -> tuple[Ready, TextSide]:
        """The engine's facts and the text side; raises a 503 unless new work may be started."""
        phase = self.phase
        if phase == "dead":
            raise unavailable("The engine is dead; this server is about to end.", "engine_dead")
        if phase == "draining":
            raise unavailable("The server is shutting down.", "draining")
        if phase == "stalled":
            raise unavailable(
                f"The engine has ended no step for {self.stalled_s:.0f} s (--watchdog-timeout).",
                "stalled",
            )
        ready, text = self.client.ready, self.text
        if phase == "loading" or ready is None or text is None:
            detail = shorten(self.loading_detail, 200)
            raise unavailable(f"The model is loading ({detail}).", "loading")
        return ready, text

    @functools.cached_property
    def grammars(self) -> GrammarPool:
        """Compiles what requests demand, to find what cannot be before anything is answered."""
        output = self.config.output
        return GrammarPool(
            GrammarHost(self._vocabulary),
            deadline_s=output.grammar_compile_timeout_secs,
            any_whitespace=not output.disable_any_whitespace,
        )

    def _vocabulary(self) -> Vocabulary:
        ready, tokenizer = self.client.ready, self.text.tokenizer if self.text else None
        assert ready is not None
        ends = tokenizer.eos_token_ids if tokenizer is not None else frozenset()
        return vocabulary_of(tokenizer, ready.vocab_size, ends)

    def model_name(self, asked: str | None) -> str:
        """The name that an answer carries; raises a 404 for a model that is not served here."""
        if asked is None:
            return self.names[0]
        if asked not in self.names:
            served = ", ".join(self.names)
            raise APIError(
                404,
                f"The model {shorten(asked, 100)!r} does not exist; this server has: {served}.",
                param="model",
                code="model_not_found",
            )
        return asked

    def draw_seed(self) -> int:
        """A seed for a request without one; the sequence is fixed by --seed."""
        return self._seeds.getrandbits(63)

    def reserve(self, num_samples: int, num_tokens: int) -> contextlib.ExitStack:
        """A place in the engine's queue for `num_samples` requests that carry `num_tokens` in
        all, until the returned context ends. Raises a 429 if there is none now, a 400 if
        there never will be.
        """
        limits, queue = self.config.server, self.shared.queue
        capacity = self.config.scheduler.max_num_seqs + limits.max_queued_requests
        room = limits.max_queued_tokens
        if num_samples > capacity:
            raise bad_request(
                f"The request asks for {num_samples} sequences; this server holds {capacity}.", "n"
            )
        if num_tokens > room:
            raise bad_request(
                f"The request has {num_tokens} tokens in prompts and large parameters (logit_bias, "
                f"bad_words, grammars), counted for each of its samples; this server holds {room} "
                "(--max-queued-tokens).",
                "n",
            )
        place = contextlib.ExitStack()
        queue.occupy(num_samples, num_tokens)
        place.callback(queue.occupy, -num_samples, -num_tokens)
        full = None
        if queue.num_samples > capacity:
            full = f"{capacity} sequences run or wait"
        elif queue.num_tokens > room:
            full = f"{room} tokens run or wait, --max-queued-tokens"
        if full is not None:
            place.close()
            raise overloaded(f"The queue is full ({full}). Retry later.")
        return place

    def request_timer(self, request: GenerateRequest) -> RequestTimer:
        is_logged = self.config.server.enable_log_request_stats
        return RequestTimer(self.metrics, request, is_logged=is_logged)

    def first_token(self) -> contextlib.AbstractContextManager[object]:
        """The wait for the very first token is timed as the end of the start-up."""
        if self._has_generated:
            return contextlib.nullcontext()
        self._has_generated = True
        return span("first_token")

    @contextlib.contextmanager
    def serving(self) -> Iterator[None]:
        """One API request is being served: a drain waits for it."""
        self.num_active += 1
        self.idle.clear()
        try:
            yield
        finally:
            self.num_active -= 1
            if self.num_active == 0:
                self.idle.set()

    @contextlib.contextmanager
    def generating(self, generation: Stoppable) -> Iterator[None]:
        """`generation` runs in the engine, unless everything has been stopped already, until it has
        ended or taken too long.
        """
        if self._stopped is not None:
            raise self._stopped
        if not self.open:
            self.shared.queue.set_busy(True)
        self.open.add(generation)
        limit_s, loop = self.config.server.request_timeout, asyncio.get_running_loop()
        with contextlib.ExitStack() as end:
            end.callback(self._close, generation)
            if limit_s is not None:
                timer = loop.call_later(limit_s, generation.fail, overdue(limit_s))
                end.callback(timer.cancel)
            yield

    def _close(self, generation: Stoppable) -> None:
        self.open.discard(generation)
        if not self.open:
            self.shared.queue.set_busy(False)

    async def abort(self, job_id: str | None) -> int:
        """End the running generation of that id, or all; how many there were. The engine finds
        those of other processes. Raises EngineDead.
        """
        found = [each for each in self.open if job_id in (None, each.job_id)]
        for generation in found:
            generation.fail(ended_by_operator())
        return len(found) + (await self.client.commands.ask("abort", job_id)).num_jobs

    def stop_all(self, error: APIError) -> None:
        """End every running generation, and any that starts from now on, with `error`."""
        self._stopped = error
        for generation in tuple(self.open):
            generation.fail(error)
