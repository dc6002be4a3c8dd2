"""Who runs in the next step; and what a step's result changes.

    add --> waiting --schedule--> running (slots) --commit--> finished
               ^------ preempted ------'

A step has a token budget: decodes first, then chunks of prefills, then new requests (decodes last
with `prefill_first`), each in order of rank: by priority, then arrival; nobody overtakes. A request
is let in when a slot and the pages for its whole known sequence are there; only those whose
priority is behind its own are sent away for that. If a running one lacks pages later, the last in
rank is preempted and computes again what it had.

Any number of steps may be in flight. `schedule` plans with upper bounds; `commit`, in launch order,
replaces them by facts and drops the results of those who have left (see `RunningSet`).
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from dataclasses import dataclass, field

from tokenspeed.batch import Batch, Row, RowResult, SlotStart, StepResult
from tokenspeed.engine.acceptance import keep_prompt_logprobs, keep_tokens, make_delta
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.messages import Stats
from tokenspeed.engine.record import Request, State
from tokenspeed.engine.running_set import RunningSet
from tokenspeed.engine.sampler import ERRORS
from tokenspeed.engine.step_timing import StepTiming
from tokenspeed.kernels.sample_rows import NOT_FINITE
from tokenspeed.kv.manager import KVManager
from tokenspeed.request import FinishReason, InvalidRequest, RequestDelta, resolve_max_tokens


@dataclass(slots=True)
class _Plan:
    """The step that is being put together."""

    step: int
    budget: int
    rows: list[Row] = field(default_factory=list)
    starts: list[SlotStart] = field(default_factory=list)
    short: Request | None = None
    """The first in rank that lacked pages: none behind it may take any in this step."""

    def add(self, admission: Admission, num_tokens: int) -> None:
        self.rows.append(admission.launch_row(self.step, num_tokens))
        self.budget -= num_tokens


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
        self._token_budget = token_budget
        self._max_model_len = max_model_len
        self._tokens_per_step = tokens_per_step
        decodes, prompts = (self._plan_decodes,), (self._plan_prefills, self._admit)
        self._plans = prompts + decodes if prefill_first else decodes + prompts
        self._requests: dict[str, Request] = {}
        self._waiting: list[Request] = []  # in order of rank
        self._running_set = RunningSet(kv, max_num_seqs)
        self._launched: deque[int] = deque()
        self._orders = itertools.count()
        self._timing = StepTiming()
        self._num_steps = self._num_scheduled_tokens = 0
        self._num_preemptions = 0
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
            num_waiting=len(self._waiting),
            kv_usage=self._kv.usage,
            prefix_queries=self._kv.prefix_queries,
            prefix_hits=self._kv.prefix_hits,
            preemptions=self._num_preemptions,
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
        self._wait(request)

    def _wait(self, request: Request) -> None:
        bisect.insort(self._waiting, request, key=lambda one: one.rank)

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
        self._send_away(admission)
        self._waiting.remove(admission.request)
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
            self._waiting.remove(request)
        self._end(request, state, *running)
        return make_delta(request, [])

    def schedule(self) -> Batch | None:
        """The next step, which the caller launches; None if there is nothing to do before a commit.

        Without steps in flight and with work left there is always a step: of those that run, the
        first in rank either finds its pages or takes them from others.
        """
        self._timing.begin_plan()
        if self._waiting:
            for admission in self._running_set.in_the_way(self._waiting[0]):
                self._preempt(admission)
        plan = _Plan(self._num_steps, self._token_budget)
        for add_rows in self._plans:
            add_rows(plan)
        if not plan.rows:
            return None
        self._num_steps += 1
        self._num_scheduled_tokens += self._token_budget - plan.budget
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
        requests = [one.request for one in self._running_set.running] + list(self._waiting)
        assert {request.id for request in requests} == self._requests.keys(), "a lost request"
        running = [one.request.rank for one in self._running_set.running]
        waiting = [request.rank for request in self._waiting]
        for ranks in (running, waiting):
            assert ranks == sorted(set(ranks)), f"out of the order of rank: {ranks}"
        # Of one priority, whoever runs came before whoever waits.
        ranks = sorted(running + waiting, key=lambda rank: rank[0])
        assert ranks == sorted(ranks), f"overtaken: {running} run, {waiting} wait"
        self._running_set.check()

    def _limit(self, request: Request) -> int:
        """KV positions that may be planned: with one token a step, those that will be committed."""
        if request.max_tokens == 0:
            return request.num_prompt
        if self._tokens_per_step == 1:
            return request.num_prompt + request.max_tokens - 1
        return self._max_model_len

    def _plan_decodes(self, plan: _Plan) -> None:
        """Decodes that would fill the budget leave a share to running prefills, and take turns."""
        width, running = self._tokens_per_step, self._running_set.running
        ready = [one for one in running if one.can_decode and one.last_step != plan.step]
        to_prefill = sum(one.num_to_prefill for one in running)
        floor = min(to_prefill, max(1, plan.budget // 4))
        if plan.budget - floor < width and plan.step % 2:
            floor = 0  # there is no budget for both: they have every second step
        if len(ready) * width > plan.budget - floor:
            ready.sort(key=lambda one: one.last_step)
        for admission in ready:
            if plan.budget - floor < width:
                break
            if not admission.is_running:  # preempted for another one, just now
                continue
            num_tokens = min(width, admission.limit - admission.num_planned)
            if self._make_room(admission, admission.num_planned + num_tokens, plan):
                plan.add(admission, num_tokens)

    def _make_room(self, admission: Admission, num_tokens: int, plan: _Plan) -> bool:
        """Pages for `num_tokens` positions, if need be those of requests behind this one in rank.
        False: they will be there after commits, or when others have ended.
        """
        kv, holding, request = self._kv, admission.holding, admission.request
        if kv.pages_for(num_tokens) <= len(holding.tables[0]):
            return True
        if plan.short is not None and plan.short.rank < request.rank:
            return False
        num_expected = request.num_prompt + request.max_tokens
        while not kv.allocate(holding, num_tokens, num_expected=num_expected):
            plan.short = request
            missing = kv.pages_for(num_tokens) - len(holding.tables[0])
            if kv.num_available + self._running_set.num_coming >= missing:
                return False
            last = self._running_set.running[-1]
            if last is admission or last.last_step == plan.step:
                return False
            self._preempt(last)
        return True

    def _plan_prefills(self, plan: _Plan) -> None:
        for admission in self._running_set.running:
            num_tokens = min(plan.budget, admission.num_to_prefill)
            if num_tokens > 0:
                plan.add(admission, num_tokens)

    def _admit(self, plan: _Plan) -> None:
        """Let waiting requests in, in order, while budget, slots and pages last."""
        while self._waiting and plan.budget > 0 and self._running_set.has_free_slot:
            request = self._waiting[0]
            if plan.short is not None and plan.short.rank < request.rank:
                return
            admission = self._running_set.enter(request, self._limit(request))
            if admission is None:
                return
            del self._waiting[0]
            request.move(State.PREFILLING)
            request.timeline.schedule(self._timing.now)
            if request.num_preemptions == 0:
                request.num_cached_tokens = admission.num_computed
            plan.starts.append(admission.start())
            plan.add(admission, min(plan.budget, admission.num_to_prefill))

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

    def _preempt(self, admission: Admission) -> None:
        self._num_preemptions += 1
        self._send_away(admission)

    def _send_away(self, admission: Admission) -> None:
        request = admission.request
        request.move(State.PREEMPTED)
        request.timeline.preempt(self._timing.now)
        request.num_preemptions += 1
        self._wait(request)
        self._running_set.leave(admission)
