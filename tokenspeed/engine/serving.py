"""The engine process's work: build the engine, then serve until a client asks for the end.

It blocks while idle. A message that cannot be read is logged; a request that cannot be read or
served gets a delta with an error; only a bug in the loop itself ends the process, after saying so.
"""

from __future__ import annotations

import gc
import time

import msgspec

from tokenspeed import ledger
from tokenspeed.engine.build import build_engine
from tokenspeed.engine.core_watch import watch_cores
from tokenspeed.engine.engine import Engine
from tokenspeed.engine.link import EngineLink
from tokenspeed.engine.messages import (
    Abort,
    Command,
    Done,
    Failed,
    Launch,
    Loading,
    Shutdown,
    StepOutputs,
    Submit,
    ToEngine,
    Unread,
)
from tokenspeed.engine.profiler import Profiler, ProfileRefused
from tokenspeed.log import logger
from tokenspeed.options import ConfigError
from tokenspeed.request import FinishReason, GenerateRequest, InvalidRequest, RequestDelta, job_of
from tokenspeed.text.errors import ModelError
from tokenspeed.wording import counted

IDLE_CHECK_MS = 1000
"""Idle for this long, the engine checks its invariants once before it blocks."""


class Server:
    """Joins a link and an engine: who asked for what, and to whom each delta goes. Traces of its
    steps are written to `profile_dir`, if there is one.
    """

    def __init__(self, engine: Engine, link: EngineLink, profile_dir: str | None = None) -> None:
        self._engine = engine
        self._link = link
        self._profiler = Profiler(profile_dir, lambda: engine.stats.steps)
        self._owners: dict[str, bytes] = {}
        self._outbox: dict[bytes, list[RequestDelta]] = {}

    def run(self) -> None:
        """Serve until a client asks for the end."""
        is_checked = False
        while True:
            stepping = self._engine.has_work
            is_busy = stepping or self._engine.has_spare_work
            timeout_ms = 0 if is_busy else None if is_checked else IDLE_CHECK_MS
            num_clients = len(self._link.clients)
            messages = self._link.receive(timeout_ms)
            has_newcomer = len(self._link.clients) > num_clients
            for client, message in messages:
                if isinstance(message, Shutdown):
                    return
                self._handle(client, message)
            has_stepped = stepping or self._engine.has_work
            if has_stepped:
                with self._profiler.step():
                    deltas = self._engine.step()
                self._engine.host.begin()
                self._post(deltas)
                is_checked = False
            elif not messages and not is_busy and not is_checked:
                self._engine.check()
                is_checked = True
            has_news = stepping or bool(messages and not has_stepped)  # without steps in a pause
            if has_news or self._outbox or has_newcomer:
                self._send()
            if has_stepped:
                self._engine.host.committed()
            if not messages and self._engine.prepare() and not self._engine.has_spare_work:
                self._send()  # it is over: whoever asks for readiness with all graphs hears of it

    def _handle(self, client: bytes, message: ToEngine | Unread) -> None:
        if isinstance(message, Abort):
            own = [id for id in message.request_ids if self._owners.get(id) == client]
            self._post(self._engine.abort(own))
        elif isinstance(message, Command):
            done = self._command(message)
            self._send()  # first: whoever has the answer finds its effect
            self._link.send(client, done)
        elif isinstance(message, Submit):
            request_id = message.request.id
            end = self._add(message.request)
            if end is None:
                self._owners[request_id] = client
            else:
                self._outbox.setdefault(client, []).append(end)
        elif isinstance(message, Unread):
            end = RequestDelta(
                request_id=message.request_id,
                finish_reason=FinishReason.ERROR,
                error=f"it cannot be read: {message.why}",
            )
            self._outbox.setdefault(client, []).append(end)

    def _command(self, message: Command) -> Done:
        engine = self._engine
        if message.action == "pause":
            engine.pause()
        elif message.action == "continue":
            engine.resume()
        elif message.action == "flush_cache":
            return Done(message.number, num_pages=engine.flush_cache())
        elif message.action == "abort":
            return Done(message.number, num_jobs=self._abort_job(message.job_id))
        elif message.action in ("start_profile", "stop_profile"):
            return self._profile(message)
        return Done(message.number)

    def _profile(self, message: Command) -> Done:
        profiler = self._profiler
        try:
            is_start = message.action == "start_profile"
            profile = profiler.start(message.num_steps) if is_start else profiler.stop()
        except ProfileRefused as error:
            return Done(message.number, refusal=str(error))
        return Done(message.number, profile=profile)

    def _abort_job(self, job_id: str | None) -> int:
        """End the requests of one job, or all; how many jobs had some."""
        jobs = {id: job_of(id) for id in self._owners}
        ids = [id for id, job in jobs.items() if job_id in (None, job)]
        self._post(self._engine.abort(ids))
        return len({jobs[id] for id in ids})

    def _add(self, request: GenerateRequest) -> RequestDelta | None:
        """Queue a request; its end if it cannot be."""
        end = RequestDelta(request_id=request.id, finish_reason=FinishReason.ERROR)
        try:
            if request.id in self._owners:
                raise InvalidRequest("its id is in use")
            self._engine.add(request)
        except InvalidRequest as error:
            end.error, end.is_refusal = str(error), True
        except Exception as error:
            logger.exception("request %s could not be queued", request.id)
            end.error = f"the engine failed on this request: {type(error).__name__}: {error}"
        else:
            return None
        return end

    def _post(self, deltas: list[RequestDelta]) -> None:
        for delta in deltas:
            client = self._owners.get(delta.request_id)
            if client is None:
                continue
            if delta.finish_reason is not None:
                del self._owners[delta.request_id]
            self._outbox.setdefault(client, []).append(delta)

    def _send(self) -> None:
        """One message to every client. Requests of a client that is gone are aborted."""
        outbox, self._outbox = self._outbox, {}
        stats = self._engine.stats
        for client in tuple(self._link.clients):
            self._link.send(client, StepOutputs(outbox.get(client, []), stats))
        if gone := self._link.take_gone():
            lost = [key for key, owner in self._owners.items() if owner in gone]
            logger.warning("a client is gone; aborting its %s", counted(len(lost), "request"))
            self._engine.abort(lost)
            for key in lost:
                del self._owners[key]
            self._send()  # the others hear of it


def load_and_serve(launch: Launch, link: EngineLink) -> int:
    """Until the end; the process's exit code."""
    began = time.monotonic()

    def progress(phase: str, detail: str) -> None:
        if any(isinstance(message, Shutdown) for message in link.peek()):
            raise SystemExit(0)
        link.announce(Loading(phase, detail))

    try:
        engine = build_engine(launch.config, progress, defer_graphs=True)
        gc.freeze()  # a collection that walks all that is here now takes 0.3 s, between two steps
        gc.enable()  # until now there was none
    except (ModelError, ConfigError) as error:  # the front logs it
        link.announce(Failed(str(error), is_refusal=True))
        return 1
    except Exception as error:
        logger.exception("the engine could not start")
        link.announce(Failed(f"the engine could not start: {type(error).__name__}: {error}"))
        return 1
    seconds = time.monotonic() - began
    link.announce(msgspec.structs.replace(engine.ready, seconds=seconds, jit=ledger.totals()))
    watch_cores(launch.config.model.device)
    try:
        Server(engine, link, launch.config.server.profile_dir).run()
    except Exception as error:
        logger.exception("the engine died")
        link.announce(Failed(f"the engine died: {type(error).__name__}: {error}"))
        return 1
    return 0
