"""The engine: three verbs a step, and nobody's failure but one's own.

    batch = scheduler.schedule();  step = worker.launch(batch);  scheduler.commit(step.result())

With overlap one step is in flight: batch N + 1 is scheduled and launched before the result of N is
committed. A step that raises (a kernel, memory) is run again row by row, each row as a batch of its
own: rows that raise again end their request with an error, all others lose nothing. If none is
left, the device itself may be lost: then the error of a check of it ends the engine.

Rows with a grammar need the tokens of the step before: a step with such rows is launched, the one
before is committed while it runs, and only then it is sampled. A row whose mask is late is sent
away, and computes again what it had when the mask is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from torch import Tensor

from tokenspeed import ledger
from tokenspeed.batch import Batch, Row, RowResult, StepResult
from tokenspeed.constraint import StructuredOutputs
from tokenspeed.engine.acceptance import make_delta
from tokenspeed.engine.grammars import Grammars
from tokenspeed.engine.host_time import HostTime
from tokenspeed.engine.messages import Ready, Stats
from tokenspeed.engine.record import Request, State
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.log import logger
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestDelta,
)

COMPILE_POLL_S = 0.005
"""How long a step that has nothing else to do waits for a grammar or a mask."""


class LaunchedStep(Protocol):
    """What a worker hands back (`worker.Step`)."""

    batch: Batch

    def sample(self, masks: Tensor | None = None) -> None: ...
    def wait(self) -> None: ...
    def result(self) -> StepResult: ...


class BatchRunner(Protocol):
    """What the engine needs of a worker."""

    def launch(self, batch: Batch) -> LaunchedStep: ...
    def check_device(self) -> None: ...


class SpareWork(Protocol):
    """What is done when nobody waits (`graph_work.GraphWork`)."""

    @property
    def num_later(self) -> int: ...
    def may_record(self, is_idle: bool) -> bool: ...
    def record_next(self) -> None: ...


class Engine:
    """Requests in, deltas out; one thread. `ready` tells clients what is served. `forbid_jit`: a
    step that would have to compile something raises instead, and so ends the requests in it that
    need it when they are run alone.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: BatchRunner,
        *,
        ready: Ready,
        eos_ids: frozenset[int],
        overlap: bool,
        forbid_jit: bool = False,
        grammars: Grammars | None = None,
        spare_work: SpareWork | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self.ready = ready
        self._eos_ids = eos_ids
        self._overlap = overlap
        self._forbid_jit = forbid_jit
        self._grammars = grammars
        self._spare_work = spare_work
        self.host = HostTime()
        self._in_flight: LaunchedStep | None = None
        self._is_paused = False

    @property
    def has_work(self) -> bool:
        if self._is_paused:
            return self._in_flight is not None
        return self._scheduler.has_work or self._num_compiling > 0

    @property
    def stats(self) -> Stats:
        stats = self._scheduler.stats
        num_waiting = stats.num_waiting + self._num_compiling
        return msgspec.structs.replace(
            stats,
            num_waiting=num_waiting,
            late_masks=0 if self._grammars is None else self._grammars.num_held,
            jit=ledger.totals(),
            graphs_to_come=0 if self._spare_work is None else self._spare_work.num_later,
            is_paused=self._is_paused,
            host_launch_s=self.host.launch_s,
            host_commit_s=self.host.commit_s,
        )

    @property
    def _num_compiling(self) -> int:
        """Requests that wait for their grammar, or for a mask."""
        return 0 if self._grammars is None else len(self._grammars)

    def add(self, spec: GenerateRequest) -> None:
        """Queue a request, or raise InvalidRequest and change nothing."""
        vocab_size = self.ready.vocab_size
        ends = (min(spec.prompt_ids, default=0), max(spec.prompt_ids, default=0))
        for bad in (token for token in ends if not 0 <= token < vocab_size):
            raise InvalidRequest(
                f"the prompt has token {bad}, but the vocabulary has {vocab_size} tokens", "prompt"
            )
        if spec.adapter is not None:
            raise InvalidRequest(f"adapter {spec.adapter!r} is not loaded", "model")
        spec.params.check_vocabulary(vocab_size)
        request = Request(spec, eos_ids=self._eos_ids)
        if self._grammars is not None and request.id in self._grammars:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        if spec.params.structured_outputs is None:
            self._scheduler.add(request)
            return
        self._scheduler.settle(request)
        self._require_grammars().begin(request)

    def check_grammar(self, asked: StructuredOutputs) -> None:
        """Compile a grammar now. Raises InvalidRequest."""
        self._require_grammars().check(asked)

    def abort(self, ids: Iterable[str]) -> list[RequestDelta]:
        """End requests now, in whatever state; unknown ids have ended and are skipped."""
        deltas = [self._abort(request_id) for request_id in ids]
        return [delta for delta in deltas if delta is not None]

    def step(self) -> list[RequestDelta]:
        """One step, and what has been committed by it (with overlap, of the step before)."""
        if self._is_paused:
            return self._run(None)
        deltas = self._queue_compiled()
        self.host.begin()
        batch = self._scheduler.schedule()
        if batch is None and self._in_flight is None and self._grammars:
            self._grammars.wait(COMPILE_POLL_S)
        with ledger.serving(lambda: _shapes(batch), forbid=self._forbid_jit):
            return deltas + self._run(batch)

    def pause(self) -> None:
        """Launch no step until `resume`. Requests keep their place and their pages."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def flush_cache(self) -> int:
        """Forget the prefixes that no request uses; how many pages of each group that frees."""
        return self._scheduler.flush_cache()

    @property
    def has_spare_work(self) -> bool:
        """Is there something for `prepare` to do, whenever that may be?"""
        work = self._spare_work
        return work is not None and work.num_later > 0 and not self._is_paused

    def prepare(self) -> bool:
        """Do a piece of what makes later steps faster, if nobody waits; was there one?"""
        work = self._spare_work
        if (
            work is None
            or self._is_paused
            or self.stats.num_waiting
            or not work.may_record(not self.has_work)
        ):
            return False
        try:
            with ledger.rehearsing():
                work.record_next()
        except Exception as error:
            logger.error("a CUDA graph could not be recorded; no more are", exc_info=error)
            self._spare_work = None
            self._worker.check_device()
        return True

    def check(self) -> None:
        """Assert the invariants of queues, pages and prefix tree."""
        self._scheduler.check()

    def _require_grammars(self) -> Grammars:
        if self._grammars is None:
            raise InvalidRequest("this engine has no structured output", "structured_outputs")
        return self._grammars

    def _abort(self, request_id: str) -> RequestDelta | None:
        if self._grammars is None or request_id not in self._grammars:
            return self._scheduler.abort(request_id)
        request = self._grammars.take(request_id)
        return _end(request, State.ABORTED, FinishReason.ABORT)

    def _queue_compiled(self) -> list[RequestDelta]:
        """Requests whose grammar has been compiled join the queue; the others' ends."""
        if self._grammars is None:
            return []
        ends = []
        for request, error in self._grammars.take_ready():
            if error is None:
                self._scheduler.add(request)
            else:
                request.error, request.is_refusal = error, True
                ends.append(_end(request, State.FINISHED, FinishReason.ERROR))
        return ends

    def _run(self, batch: Batch | None) -> list[RequestDelta]:
        previous, self._in_flight = self._in_flight, None
        if batch is None:
            return self._finish(previous)
        needs_masks = self._needs_masks(batch)
        deltas: list[RequestDelta] = []
        try:
            step = self._worker.launch(batch)
            if not needs_masks:
                step.sample()
            self.host.launched()
        except Exception as error:
            return self._finish(previous) + self._run_rows(batch, error)
        if needs_masks:
            deltas += self._finish(previous)
            previous = None
            try:
                masks, ends = self._masks(batch)
                deltas += ends
                self.host.begin()
                step.sample(masks)
                self.host.launched()
            except Exception as error:
                return deltas + self._run_rows(batch, error)
        if self._overlap:
            self._in_flight = step
        else:
            previous = step
        return deltas + self._finish(previous)

    def _needs_masks(self, batch: Batch) -> bool:
        requests = self._scheduler.sampled_requests(batch)
        return any(each is not None and each.constraint is not None for each in requests)

    def _masks(self, batch: Batch) -> tuple[Tensor | None, list[RequestDelta]]:
        """Masks of the sampled rows, and the ends of requests that cannot follow their grammar.
        Those whose mask is late leave the batch until it is there.
        """
        if self._grammars is None:
            return None, []
        found = self._grammars.masks(self._scheduler.sampled_requests(batch))
        for request_id in found.late:
            self._grammars.hold(self._scheduler.park(request_id))
        ends = [self._scheduler.refuse(*failure) for failure in found.failures.items()]
        return found.masks, ends

    def _finish(self, step: LaunchedStep | None) -> list[RequestDelta]:
        """Commit a launched step. Its sampling is done, so it cannot be run again: should even the
        copy to the host fail, its requests end.
        """
        if step is None:
            return []
        try:
            step.wait()
            self.host.begin()
            result = step.result()
        except Exception as error:
            self.host.begin()
            logger.error("step %d gave no result", step.batch.step, exc_info=error)
            self._worker.check_device()
            rows = [_failed(row, error) for row in step.batch.rows]
            result = StepResult(batch=step.batch, rows=rows)
        deltas = self._scheduler.commit(result)
        self.host.committed()
        return deltas

    def _run_rows(self, batch: Batch, cause: Exception) -> list[RequestDelta]:
        """Run a step that raised again, each row as a batch of its own, and commit it."""
        count = len(batch.rows)
        logger.error(
            "step %d raised; running its %d rows one by one", batch.step, count, exc_info=cause
        )
        results, deltas = [], []
        for row in batch.rows:
            starts = [start for start in batch.starts if start.slot == row.slot]
            try:
                alone = Batch(step=batch.step, rows=[row], starts=starts)
                step = self._worker.launch(alone)
                masks, ends = self._masks(alone)
                deltas += ends
                step.sample(masks)
                results += step.result().rows
            except Exception as row_error:
                results.append(_failed(row, row_error))
        if all(result.error is not None for result in results):
            self._worker.check_device()
        return deltas + self._scheduler.commit(StepResult(batch=batch, rows=results))


def _end(request: Request, state: State, reason: FinishReason) -> RequestDelta:
    """The delta of a request that was never queued."""
    request.finish_reason = reason
    request.move(state)
    return make_delta(request, [])


def _shapes(batch: Batch | None) -> str:
    """What a step is, for whoever wants to know why something was compiled."""
    if batch is None:
        return "between steps"
    counts = [row.num_tokens for row in batch.rows]
    return f"step {batch.step} of {sum(counts)} tokens in {len(counts)} rows"


def _failed(row: Row, error: Exception) -> RowResult:
    lines = str(error).splitlines() or [""]
    message = f"the engine failed on this request: {type(error).__name__}: {lines[0][:200]}"
    return RowResult(slot=row.slot, generation=row.generation, error=message)
