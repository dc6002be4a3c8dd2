"""The engine: three verbs a step, and nobody's failure but one's own.

    batch = scheduler.schedule();  step = worker.launch(batch);  scheduler.commit(step.result())

With overlap one step is in flight: batch N + 1 is scheduled and launched before the result of N is
committed. A step that raises (a kernel, memory) is run again row by row, each row as a batch of its
own: rows that raise again end their request with an error, all others lose nothing. If none is
left, the device itself may be lost: then the error of a check of it ends the engine.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from tokenspeed import ledger
from tokenspeed.batch import Batch, Row, RowResult, StepResult
from tokenspeed.engine.messages import Ready, Stats
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.log import logger
from tokenspeed.request import GenerateRequest, InvalidRequest, Request, RequestDelta


class LaunchedStep(Protocol):
    """What a worker hands back (`worker.Step`)."""

    batch: Batch

    def sample(self) -> None: ...
    def result(self) -> StepResult: ...


class BatchRunner(Protocol):
    """What the engine needs of a worker."""

    def launch(self, batch: Batch) -> LaunchedStep: ...
    def check_device(self) -> None: ...


class Engine:
    """Requests in, deltas out; one thread. `ready` tells clients what is served. `forbid_jit`: a
    step that would have to compile something raises instead, and so ends the requests in it that
    need it.
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
    ) -> None:
        self._scheduler = scheduler
        self._worker = worker
        self.ready = ready
        self._eos_ids = eos_ids
        self._overlap = overlap
        self._forbid_jit = forbid_jit
        self._in_flight: LaunchedStep | None = None

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def stats(self) -> Stats:
        return msgspec.structs.replace(self._scheduler.stats, jit=ledger.totals())

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
        self._scheduler.add(Request(spec, eos_ids=self._eos_ids))

    def abort(self, ids: Iterable[str]) -> list[RequestDelta]:
        """End requests now, in whatever state; unknown ids have ended and are skipped."""
        deltas = [self._scheduler.abort(request_id) for request_id in ids]
        return [delta for delta in deltas if delta is not None]

    def step(self) -> list[RequestDelta]:
        """One step, and what has been committed by it (with overlap, of the step before)."""
        batch = self._scheduler.schedule()
        with ledger.serving(lambda: _shapes(batch), forbid=self._forbid_jit):
            return self._run(batch)

    def check(self) -> None:
        """Assert the invariants of queues, pages and prefix tree."""
        self._scheduler.check()

    def _run(self, batch: Batch | None) -> list[RequestDelta]:
        previous, self._in_flight = self._in_flight, None
        launched: LaunchedStep | None = None
        deltas: list[RequestDelta] = []
        if batch is not None:
            try:
                launched = self._launch(batch)
            except Exception as error:
                deltas += self._finish(previous)
                previous = None
                deltas += self._scheduler.commit(self._run_rows(batch, error))
        if self._overlap:
            self._in_flight = launched
        else:
            previous = launched
        return deltas + self._finish(previous)

    def _launch(self, batch: Batch) -> LaunchedStep:
        step = self._worker.launch(batch)
        step.sample()
        return step

    def _finish(self, step: LaunchedStep | None) -> list[RequestDelta]:
        """Commit a launched step. Its sampling is done, so it cannot be run again: should even the
        copy to the host fail, its requests end.
        """
        if step is None:
            return []
        try:
            result = step.result()
        except Exception as error:
            logger.error("step %d gave no result", step.batch.step, exc_info=error)
            self._worker.check_device()
            rows = [_failed(row, error) for row in step.batch.rows]
            result = StepResult(batch=step.batch, rows=rows)
        return self._scheduler.commit(result)

    def _run_rows(self, batch: Batch, error: Exception) -> StepResult:
        """Run a step that raised again, each row as a batch of its own."""
        count = len(batch.rows)
        logger.error(
            "step %d raised; running its %d rows one by one", batch.step, count, exc_info=error
        )
        results = []
        for row in batch.rows:
            starts = [start for start in batch.starts if start.slot == row.slot]
            try:
                step = self._launch(Batch(step=batch.step, rows=[row], starts=starts))
                results += step.result().rows
            except Exception as row_error:
                results.append(_failed(row, row_error))
        if all(result.error is not None for result in results):
            self._worker.check_device()
        return StepResult(batch=batch, rows=results)


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
