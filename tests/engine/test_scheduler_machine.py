"""The scheduler under random submit, abort, failure and preemption, any number of steps in flight:
no leak, no double owner, no lost, duplicated or wrong token.
"""

from __future__ import annotations

import os
from collections import Counter

from fake_worker import EOS_IDS, FakeWorker, run_alone
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.batch import Row
from tokenspeed.engine.record import Request, State
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.specs import CacheGroup, FullAttention
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    RequestDelta,
    SamplingParams,
)

MAX_MODEL_LEN = 40
WAITING = (State.WAITING, State.PREEMPTED)
RUNNING = (State.PREFILLING, State.DECODING)
SPEC = FullAttention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)
# Prompts that share beginnings, so that prefixes are found, split and duplicated.
PROMPTS = st.builds(
    lambda base, length, tail: (base * 5)[:length] + tail,
    st.sampled_from([[1, 2, 3, 4, 5, 6], [1, 2, 3, 6, 5, 4]]),
    st.integers(1, 24),
    st.lists(st.integers(1, 6), max_size=3),
)
PARAMS = st.builds(
    lambda max_tokens, min_tokens, stops, ignore_eos, logprobs, prompt_logprobs: SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens if max_tokens is None else min(min_tokens, max_tokens),
        stop_token_ids=stops,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    ),
    st.one_of(st.none(), st.integers(0, 12)),
    st.integers(0, 6),
    st.sampled_from([(), (), (3,)]),
    st.booleans(),
    st.sampled_from([None, 0]),
    st.sampled_from([None, None, 0]),
)


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.integers(4, 24),
        block_size=st.sampled_from([1, 2, 4]),
        num_groups=st.integers(1, 2),
        num_slots=st.integers(1, 5),
        tokens_per_step=st.sampled_from([1, 1, 2, 4]),
        extra_budget=st.integers(0, 20),
        enable_prefix_caching=st.booleans(),
        random=st.randoms(use_true_random=False),
        failures=st.sampled_from([0.0, 0.0, 0.02]),
        rejections=st.sampled_from([0.0, 0.3, 0.9]),
        has_priorities=st.booleans(),
        prefill_first=st.booleans(),
    )
    def start(
        self,
        num_pages: int,
        block_size: int,
        num_groups: int,
        num_slots: int,
        tokens_per_step: int,
        extra_budget: int,
        enable_prefix_caching: bool,
        random,
        failures: float,
        rejections: float,
        has_priorities: bool,
        prefill_first: bool,
    ) -> None:
        self.has_priorities = has_priorities
        groups = [CacheGroup(SPEC, (layer,)) for layer in range(num_groups)]
        self.kv = KVManager(groups, num_pages, block_size, enable_prefix_caching)
        self.max_model_len = min(MAX_MODEL_LEN, num_pages * block_size)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=num_slots,
            token_budget=tokens_per_step + extra_budget,
            max_model_len=self.max_model_len,
            tokens_per_step=tokens_per_step,
            prefill_first=prefill_first,
        )

        def accept(row: Row) -> int:
            most = row.num_tokens if row.decode else 1
            return random.randint(0, most) if random.random() < rejections else most

        self.worker = FakeWorker(
            num_slots=num_slots,
            num_groups=num_groups,
            num_pages=num_pages,
            block_size=block_size,
            accept=accept,
            fails=lambda row: random.random() < failures,
        )
        self.requests: dict[str, Request] = {}
        self.received: dict[str, list[RequestDelta]] = {}
        self.count = 0

    @rule(
        prompt=PROMPTS,
        params=PARAMS,
        seed=st.integers(0, 3),
        salt=st.sampled_from([None, "a"]),
        priority=st.sampled_from([0, 0, 0, -1, 1, 2]),
    )
    def submit(
        self, prompt: list[int], params: SamplingParams, seed: int, salt: str | None, priority: int
    ) -> None:
        self.count += 1
        spec = GenerateRequest(
            id=f"r{self.count}",
            prompt_ids=prompt,
            params=params,
            seed=seed,
            cache_salt=salt,
            priority=priority if self.has_priorities else 0,
        )
        request = Request(spec, eos_ids=EOS_IDS)
        try:
            self.scheduler.add(request)
        except InvalidRequest:
            length = len(prompt) + (1 if params.max_tokens is None else params.max_tokens)
            assert length > self.max_model_len
            return
        self.requests[spec.id], self.received[spec.id] = request, []

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(list(self.requests.values())))
        was_done = request.finish_reason is not None
        delta = self.scheduler.abort(request.id)
        assert (delta is None) == was_done
        if delta is not None:
            assert delta.finish_reason is FinishReason.ABORT
            self.receive([delta])

    @precondition(lambda self: len(self.worker.in_flight) < 3)
    @rule()
    def launch(self) -> None:
        waited = self.waiting()
        before = {request.id: request.num_preemptions for request in self.requests.values()}
        batch = self.scheduler.schedule()
        self.check_ranks(waited, before)
        if batch is None:
            assert self.worker.in_flight or not self.scheduler.has_work, "a deadlock"
            return
        self.worker.launch(batch)

    def waiting(self) -> list[Request]:
        return [each for each in self.requests.values() if each.state in WAITING]

    def check_ranks(self, waited: list[Request], before: dict[str, int]) -> None:
        """Nobody who waited is overtaken by another that waited; who loses its pages is behind all
        that keep theirs.
        """
        let_in = [each.rank for each in waited if each.state is State.PREFILLING]
        left = [each.rank for each in waited if each.state in WAITING]
        assert not let_in or not left or max(let_in) < min(left), "overtaken"
        running = [each for each in self.requests.values() if each.state in RUNNING]
        sent = [each for each in self.waiting() if each.num_preemptions > before[each.id]]
        kept = [each.rank for each in running if each not in waited]
        assert all(rank < each.rank for each in sent for rank in kept), "the wrong one was sent"

    @precondition(lambda self: self.worker.in_flight)
    @rule()
    def commit(self) -> None:
        self.receive(self.scheduler.commit(self.worker.result()))

    @rule(steps=st.integers(1, 8), depth=st.integers(0, 2))
    def run(self, steps: int, depth: int) -> None:
        for _ in range(steps):
            self.launch()
            while len(self.worker.in_flight) > depth:
                self.commit()
            self.scheduler.check()

    def receive(self, deltas: list[RequestDelta]) -> None:
        counts = Counter(delta.request_id for delta in deltas)
        assert all(count == 1 for count in counts.values()), "two deltas of a request in a step"
        for delta in deltas:
            earlier = self.received[delta.request_id]
            assert not earlier or earlier[-1].finish_reason is None, "a delta after the end"
            assert delta.token_ids or delta.finish_reason, "an empty delta"
            earlier.append(delta)
            self.check_request(self.requests[delta.request_id])

    def check_request(self, request: Request) -> None:
        deltas, spec = self.received[request.id], request.spec
        tokens = [token for delta in deltas for token in delta.token_ids]
        wanted, reason, stop_token = run_alone(spec, request.max_tokens)
        assert tokens == request.output_ids == wanted[: len(tokens)]
        if spec.params.logprobs is not None:
            found = [entry for delta in deltas for entry in delta.logprobs or []]
            assert [entry.token_id for entry in found] == tokens
            first = len(spec.prompt_ids)
            assert [-entry.logprob for entry in found] == list(range(first, first + len(tokens)))
        last = deltas[-1]
        if last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            assert tokens == wanted and last.finish_reason == reason
            assert last.stop_token == stop_token
        self.check_prompt_facts(spec, deltas)

    def check_prompt_facts(self, spec: GenerateRequest, deltas: list[RequestDelta]) -> None:
        assert all(delta.prompt_logprobs is None for delta in deltas[1:])
        assert all(delta.num_cached_tokens == 0 for delta in deltas[1:])
        assert deltas[0].num_cached_tokens < len(spec.prompt_ids)
        found = deltas[0].prompt_logprobs
        if spec.params.prompt_logprobs is None:
            assert found is None
        elif deltas[0].finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
            assert found is not None and found[0] is None and deltas[0].num_cached_tokens == 0
            entries = [(entry.token_id, -entry.logprob) for entry in found[1:] if entry]
            assert entries == [(spec.prompt_ids[i], i) for i in range(1, len(spec.prompt_ids))]

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(5000):
            if not self.scheduler.has_work:
                break
            self.launch()
            if self.worker.in_flight:
                self.commit()
        assert not self.scheduler.has_work, "work without end"
        self.scheduler.check()
        assert self.kv.usage == 0.0
        assert all(deltas[-1].finish_reason for deltas in self.received.values())
        stats = self.scheduler.stats
        assert stats.num_running == stats.num_waiting == 0
        outputs = sum(len(request.output_ids) for request in self.requests.values())
        assert stats.generation_tokens == outputs
        self.kv._evict(self.kv._tree.num_cached)
        assert self.kv.num_available == self.kv.num_pages
        self.kv.check([])


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=int(os.environ.get("TOKENSPEED_TEST_EXAMPLES", "300")),
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
