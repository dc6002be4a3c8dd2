"""Who is in a worker slot, on which pages; and when slot and pages may be given to somebody else.

    enter --> running --leave--> draining --last launched step has ended--> gone

Slot and pages of a stay that has ended (finished, aborted, preempted) are kept until every launched
step that names them has ended. So neither changes hands under a launched step.
"""

from __future__ import annotations

import bisect
import itertools
from dataclasses import dataclass

from tokenspeed.engine.admission import Admission
from tokenspeed.engine.record import Request
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.prefix import Namespace


@dataclass(frozen=True)
class _Short:
    """Who found too few pages: how many it needs, and what had entered the prefix cache then."""

    request: Request
    num_needed: int
    num_entered: int


class RunningSet:
    """The slots. `running` is in order of rank: the last is the first to be sent away."""

    def __init__(self, kv: KVManager, num_slots: int) -> None:
        self.running: list[Admission] = []
        self._kv = kv
        self._num_slots = num_slots
        self._by_generation: dict[int, Admission] = {}  # running and draining
        self._free_slots = list(reversed(range(num_slots)))
        self._generations = itertools.count(1)
        self._short: _Short | None = None

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    @property
    def num_coming(self) -> int:
        """Pages of each group that come, at least, with the end of steps already launched."""
        return sum(self._kv.num_returning(one.holding) for one in self._draining())

    def of(self, generation: int) -> Admission:
        return self._by_generation[generation]

    def enter(self, request: Request, limit: int) -> Admission | None:
        """A free slot, and pages for all that is known of `request`; None if pages are short.

        A page for each running request is left, so that letting one in does not soon mean sending
        it away again. A request that still wants prompt log-probabilities computes its prompt.
        """
        if self._is_still_short(request):
            return None
        tokens, known = request.token_ids(), request.prompt_logprobs
        namespace = Namespace(request.spec.adapter, request.spec.cache_salt)
        read_prefix = known is None or len(known) == request.num_prompt
        holding = self._kv.acquire(
            tokens,
            namespace,
            read_prefix=read_prefix,
            is_counted=request.num_preemptions == 0,
            num_spare=len(self.running),
            num_expected=request.num_prompt + request.max_tokens,
        )
        if holding is None:
            needed = self._kv.num_needed(tokens, namespace, read_prefix=read_prefix)
            self._short = _Short(request, needed, self._kv.num_entered)
            return None
        self._short = None
        admission = Admission(
            request,
            slot=self._free_slots.pop(),
            generation=next(self._generations),
            holding=holding,
            token_ids=tokens,
            limit=limit,
            num_computed=holding.num_cached_tokens,
            num_planned=holding.num_cached_tokens,
        )
        bisect.insort(self.running, admission, key=lambda one: one.request.rank)
        self._by_generation[admission.generation] = admission
        return admission

    def in_the_way(self, request: Request) -> list[Admission]:
        """Those whose priority is behind, the last in rank first, that have to leave before
        `request` can come in. None where what it lacks is there or on its way, or they do not have
        enough of it.
        """
        (priority, _), kv, asked = request.rank, self._kv, self._short
        if not self.running or self.running[-1].request.rank[0] <= priority:
            return []
        num_slots = len(self._by_generation) - len(self.running) + len(self._free_slots)
        if asked is None or asked.request is not request:  # it has not lacked pages so far
            return [] if num_slots else self.running[-1:]
        num_missing = asked.num_needed + len(self.running) - kv.num_available - self.num_coming
        leaving: list[Admission] = []
        for one in reversed(self.running):
            if one.request.rank[0] <= priority or (num_missing <= 0 and num_slots):
                break
            leaving.append(one)
            num_slots += 1
            num_missing -= kv.num_returning(one.holding) + 1
        return leaving if num_missing <= 0 else []

    def _is_still_short(self, request: Request) -> bool:
        """Whether nothing has changed for the better since `request` found too few pages: asking
        the cache again would cost a walk along the whole prompt, every step.
        """
        short, kv = self._short, self._kv
        if short is None or short.request is not request or short.num_entered != kv.num_entered:
            return False
        return kv.num_available < short.num_needed + len(self.running)

    def leave(self, admission: Admission) -> None:
        self.running.remove(admission)
        admission.is_running = False
        self._retire_if_drained(admission)

    def end_row(self, admission: Admission) -> None:
        """A launched step with a row of this admission has ended."""
        admission.num_in_flight -= 1
        if not admission.is_running:
            self._retire_if_drained(admission)

    def check(self) -> None:
        """Prove that slots and pages are each held once, by those who are in."""
        everyone, draining = self._by_generation.values(), self._draining()
        slots = [one.slot for one in everyone] + self._free_slots
        assert sorted(slots) == list(range(self._num_slots)), f"slots lost or shared: {slots}"
        assert len(draining) + len(self.running) == len(everyone), "a lost admission"
        assert all(one.num_in_flight > 0 for one in draining), "drained, but still there"
        for one in self.running:
            one.check(self._kv.block_size)
        self._kv.check(one.holding for one in everyone)

    def _draining(self) -> list[Admission]:
        return [one for one in self._by_generation.values() if not one.is_running]

    def _retire_if_drained(self, admission: Admission) -> None:
        """What was committed goes to the prefix tree, unless the request broke: its KV is not to be
        trusted.
        """
        if admission.num_in_flight:
            return
        request = admission.request
        num_final = 0 if request.error is not None else admission.num_computed
        self._kv.release(admission.holding, request.token_ids(), num_final)
        del self._by_generation[admission.generation]
        self._free_slots.append(admission.slot)
