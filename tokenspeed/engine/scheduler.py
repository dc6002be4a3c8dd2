"""Requests from the queue to their end; and what a step's result changes.

    add --> waiting --schedule--> running (slots) --commit--> finished
               ^------ preempted ------'

Who is in the next step says the planner (`step_plan.py`). Any number of steps may be in flight:
`schedule` plans with upper bounds; `commit`, in launch order, replaces them by facts and drops the
results of those who have left (see `RunningSet`).
"""

from __future__ import annotations

import itertools
from collections import deque

from tokenspeed.batch import Batch, Row, RowResult, StepResult
from tokenspeed.engine.acceptance import keep_prompt_logprobs, keep_tokens, make_delta
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.messages import Stats
from tokenspeed.engine.record import Request, State
from tokenspeed.engine.running_set import RunningSet
from tokenspeed.engine.sampler import ERRORS
from tokenspeed.engine.step_plan import Planner
from tokenspeed.engine.step_timing import StepTiming
from tokenspeed.kernels.sample_rows import NOT_FINITE
from tokenspeed.kv.manager import KVManager
from tokenspeed.request import FinishReason, InvalidRequest, RequestDelta, resolve_max_tokens


class Scheduler:
    """Owns the queue and, through `kv` and the slots, the pages. Knows no tensor and no text.

    `tokens_per_step` is the most tokens that a decode row can bring (its query length): one, until
    drafts of several tokens are verified in a step (speculative decoding), for which all here is
    ready and tested. With one, nothing is planned beyond `max_tokens`; with more, planning goes on
    until commits fill it, since a step may bring fewer.
    """

    def __init__(
        self,
        kv: KVManager,
        *,
        max_num_seqs: int,
        token_budget: int,
        max_model_len: int,
        tokens_per_step: int = 1,
        prefill_first: bool = False,
    ) -> None:
        assert max_num_seqs > 0 and 0 < tokens_per_step <= token_budget
        assert 0 < max_model_len <= kv.num_pages * kv.block_size, "a request has to fit the pool"
        self._kv = kv
        self._max_model_len = max_model_len
        self._requests: dict[str, Request] = {}
        self._running_set = RunningSet(kv, max_num_seqs)
        self._planner = Planner(
            kv,
            self._running_set,
            token_budget=token_budget,
            max_model_len=max_model_len,
            tokens_per_step=tokens_per_step,
            prefill_first=prefill_first,
        )
        self._launched: deque[int] = deque()
        self._orders = itertools.count()
        self._timing = StepTiming()
        self._num_steps = self._num_scheduled_tokens = 0
        self._num_nan_aborted = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0

    @property
    def has_work(self) -> bool:
        """Whether anything is left to schedule or to commit."""
        return bool(self._requests or self._launched)

    @property
    def stats(self) -> Stats:
        return Stats(
            num_running=len(self._running_set.running),
            num_waiting=len(self._planner.waiting),
            kv_usage=self._kv.usage,
            prefix_queries=self._kv.prefix_queries,
            prefix_hits=self._kv.prefix_hits,
            preemptions=self._planner.num_preemptions,
            prompt_tokens=self._num_prompt_tokens,
            generation_tokens=self._num_generation_tokens,
            nan_aborted=self._num_nan_aborted,
            steps=self._num_steps,
            scheduled_tokens=self._num_scheduled_tokens,
        )

    def add(self, request: Request) -> None:
        """Settle a request and queue it, or raise InvalidRequest and change nothing. One that was
        parked is settled already, and is now the youngest.
        """
        if request.state is State.WAITING:
            self.settle(request)
        request.order = next(self._orders)
        self._requests[request.id] = request
        self._planner.wait(request)

    def settle(self, request: Request) -> None:
        """Check a request and settle its `max_tokens`, or raise InvalidRequest with no change."""
        if request.id in self._requests:
            raise InvalidRequest(f"request id {request.id!r} is in use", "request_id")
        request.max_tokens = resolve_max_tokens(
            request.num_prompt, request.params, self._max_model_len
        )
        if request.params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]

    def abort(self, request_id: str) -> RequestDelta | None:
        """End a request, in whatever state it is; None if there is no such request (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = FinishReason.ABORT
        return self._withdraw(request, State.ABORTED)

    def park(self, request_id: str) -> Request:
        """Send a running request away until it is added again; no pages are lacking."""
        (admission,) = [one for one in self._running_set.running if one.request.id == request_id]
        self._planner.send_away(admission, self._timing.now)
        self._planner.waiting.remove(admission.request)
        return self._requests.pop(request_id)

    def flush_cache(self) -> int:
        """Forget the prefixes that no request uses; how many pages of each group that frees."""
        return self._kv.flush()

    def refuse(self, request_id: str, error: str) -> RequestDelta:
        """End a request whose demand cannot be met, in whatever state it is."""
        request = self._requests[request_id]
        request.finish_reason, request.error, request.is_refusal = FinishReason.ERROR, error, True
        return self._withdraw(request, State.FINISHED)

    def sampled_requests(self, batch: Batch) -> list[Request | None]:
        """Of the rows of a launched step that are sampled, in order: whose they are; None of one
        that has ended or was preempted.
        """
        admissions = [self._running_set.of(row.generation) for row in batch.rows if row.sample]
        return [one.request if one.is_running else None for one in admissions]

    def _withdraw(self, request: Request, state: State) -> RequestDelta:
        running = [one for one in self._running_set.running if one.request is request]
        if not running:
            self._planner.waiting.remove(request)
        self._end(request, state, *running)
        return make_delta(request, [])

    def schedule(self) -> Batch | None:
        """The next step, which the caller launches; None if there is nothing to do before a commit.

        Without steps in flight and with work left there is always a step: of those that run, the
        first in rank either finds its pages or takes them from others.
        """
        self._timing.begin_plan()
        plan = self._planner.plan(self._num_steps, self._timing.now)
        if not plan.rows:
            return None
        self._num_steps += 1
        self._num_scheduled_tokens += plan.num_tokens
        self._launched.append(plan.step)
        self._timing.launch()
        return Batch(step=plan.step, rows=plan.rows, starts=plan.starts)

    def commit(self, result: StepResult) -> list[RequestDelta]:
        """Take in the oldest launched step. Requests to which it brought nothing have no delta."""
        batch = result.batch
        oldest = self._launched.popleft()
        assert batch.step == oldest, f"step {batch.step} came before step {oldest}"
        self._timing.commit(batch, self._running_set.running)
        deltas = []
        for row, outcome in zip(batch.rows, result.rows, strict=True):
            assert (row.slot, row.generation) == (outcome.slot, outcome.generation)
            admission = self._running_set.of(row.generation)
            self._running_set.end_row(admission)
            if admission.is_running:
                delta = self._commit_row(admission, row, outcome)
                if delta is not None:
                    deltas.append(delta)
        return deltas

    def check(self) -> None:
        """Prove the invariants of queue and order, and those of slots and cache."""
        requests = [one.request for one in self._running_set.running] + list(self._planner.waiting)
        assert {request.id for request in requests} == self._requests.keys(), "a lost request"
        running = [one.request.rank for one in self._running_set.running]
        waiting = [request.rank for request in self._planner.waiting]
        for ranks in (running, waiting):
            assert ranks == sorted(set(ranks)), f"out of the order of rank: {ranks}"
        # Of one priority, whoever runs came before whoever waits.
        ranks = sorted(running + waiting, key=lambda rank: rank[0])
        assert ranks == sorted(ranks), f"overtaken: {running} run, {waiting} wait"
        self._running_set.check()

    def _commit_row(
        self, admission: Admission, row: Row, outcome: RowResult
    ) -> RequestDelta | None:
        request = admission.request
        if outcome.error is not None:
            self._num_nan_aborted += outcome.error == ERRORS[NOT_FINITE]
            request.finish_reason, request.error = FinishReason.ERROR, outcome.error
            request.is_refusal = outcome.is_refusal
            self._end(request, State.FINISHED, admission)
            return make_delta(request, [])
        if outcome.prompt_logprobs is not None:
            keep_prompt_logprobs(request, row, outcome.prompt_logprobs)
        num_kept = keep_tokens(request, outcome.token_ids)
        admission.land_row(row, len(outcome.token_ids), num_kept)
        self._num_generation_tokens += num_kept
        if not row.decode:
            self._kv.commit(admission.holding, admission.token_ids, admission.num_computed)
            if row.start + row.num_tokens == len(admission.token_ids):
                self._end_prefill(request)
        if request.finish_reason is not None:
            self._end(request, State.FINISHED, admission)
        elif not num_kept:
            return None
        logprobs = outcome.logprobs and outcome.logprobs[:num_kept]
        return make_delta(request, outcome.token_ids[:num_kept], logprobs)

    def _end_prefill(self, request: Request) -> None:
        request.timeline.end_prefill(self._timing.now)
        if State.DECODING not in request.history:
            self._num_prompt_tokens += request.num_prompt
        if request.max_tokens == 0:
            request.finish_reason = FinishReason.LENGTH
        else:
            request.move(State.DECODING)

    def _end(self, request: Request, state: State, *admissions: Admission) -> None:
        request.move(state)
        del self._requests[request.id]
        for admission in admissions:
            self._running_set.leave(admission)
