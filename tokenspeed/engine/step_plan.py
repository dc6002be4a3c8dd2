"""Who runs in the next step.

A step has a token budget: decodes first, then chunks of prefills, then new requests (decodes last
with `prefill_first`), each in order of rank: by priority, then arrival; nobody overtakes. A request
is let in when a slot and the pages for its whole known sequence are there; only those whose
priority is behind its own are sent away for that. If a running one lacks pages later, the last in
rank is preempted and computes again what it had.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

from tokenspeed.batch import Row, SlotStart
from tokenspeed.engine.admission import Admission
from tokenspeed.engine.record import Request, State
from tokenspeed.engine.running_set import RunningSet
from tokenspeed.kv.manager import KVManager


@dataclass(slots=True)
class Plan:
    """The step that is being put together, and when."""

    step: int
    now: float
    budget: int
    num_tokens: int = 0
    rows: list[Row] = field(default_factory=list)
    starts: list[SlotStart] = field(default_factory=list)
    short: Request | None = None
    """The first in rank that lacked pages: none behind it may take any in this step."""

    def add(self, admission: Admission, num_tokens: int) -> None:
        self.rows.append(admission.launch_row(self.step, num_tokens))
        self.budget -= num_tokens
        self.num_tokens += num_tokens


class Planner:
    """Puts steps together out of those who run and those who wait, both in order of rank. What its
    arguments mean says `Scheduler`.
    """

    def __init__(
        self,
        kv: KVManager,
        running_set: RunningSet,
        *,
        token_budget: int,
        max_model_len: int,
        tokens_per_step: int,
        prefill_first: bool,
    ) -> None:
        self.waiting: list[Request] = []
        self.num_preemptions = 0
        self._kv = kv
        self._running_set = running_set
        self._token_budget = token_budget
        self._max_model_len = max_model_len
        self._tokens_per_step = tokens_per_step
        decodes, prompts = (self._plan_decodes,), (self._plan_prefills, self._admit)
        self._decodes_first = decodes + prompts
        self._phases = prompts + decodes if prefill_first else self._decodes_first
        self._was_short = False

    def wait(self, request: Request) -> None:
        bisect.insort(self.waiting, request, key=lambda one: one.rank)

    def plan(self, step: int, now: float) -> Plan:
        """The next step, whose rows are launched from now on; it may have none."""
        plan = Plan(step, now, self._token_budget)
        if self.waiting:
            for admission in self._running_set.in_the_way(self.waiting[0]):
                self._preempt(admission, plan)
        # After a step in which one lacked pages it has its turn, or prompts would take them again.
        for add_rows in self._decodes_first if self._was_short else self._phases:
            add_rows(plan)
        self._was_short = plan.short is not None
        return plan

    def send_away(self, admission: Admission, now: float) -> None:
        """Let a running request wait, and compute again what it had."""
        request = admission.request
        request.move(State.PREEMPTED)
        request.timeline.preempt(now)
        request.num_preemptions += 1
        self.wait(request)
        self._running_set.leave(admission)

    def _limit(self, request: Request) -> int:
        """KV positions that may be planned: with one token a step, those that will be committed."""
        if request.max_tokens == 0:
            return request.num_prompt
        if self._tokens_per_step == 1:
            return request.num_prompt + request.max_tokens - 1
        return self._max_model_len

    def _plan_decodes(self, plan: Plan) -> None:
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

    def _make_room(self, admission: Admission, num_tokens: int, plan: Plan) -> bool:
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
            self._preempt(last, plan)
        return True

    def _plan_prefills(self, plan: Plan) -> None:
        for admission in self._running_set.running:
            num_tokens = min(plan.budget, admission.num_to_prefill)
            if num_tokens > 0:
                plan.add(admission, num_tokens)

    def _admit(self, plan: Plan) -> None:
        """Let waiting requests in, in order, while budget, slots and pages last."""
        while self.waiting and plan.budget > 0 and self._running_set.has_free_slot:
            request = self.waiting[0]
            if plan.short is not None and plan.short.rank < request.rank:
                return
            admission = self._running_set.enter(request, self._limit(request))
            if admission is None:
                return
            del self.waiting[0]
            request.move(State.PREFILLING)
            request.timeline.schedule(plan.now)
            if request.num_preemptions == 0:
                request.num_cached_tokens = admission.num_computed
            plan.starts.append(admission.start())
            plan.add(admission, min(plan.budget, admission.num_to_prefill))

    def _preempt(self, admission: Admission, plan: Plan) -> None:
        self.num_preemptions += 1
        self.send_away(admission, plan.now)
