"""The scheduler's promises one by one (the state machine next door mixes them at random)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fake_worker import EOS, EOS_IDS, FakeWorker, run_alone

from tokenspeed.batch import Batch, Row
from tokenspeed.engine.scheduler import Scheduler
from tokenspeed.kv.manager import KVManager
from tokenspeed.kv.specs import CacheGroup, FullAttention
from tokenspeed.request import (
    FinishReason,
    GenerateRequest,
    InvalidRequest,
    Request,
    RequestDelta,
    SamplingParams,
    State,
)

GROUP = CacheGroup(FullAttention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0), (0,))


class Bench:
    """A scheduler over a fake worker, with `depth` steps in flight."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 4,
        token_budget: int = 16,
        max_model_len: int = 256,
        tokens_per_step: int = 1,
        depth: int = 0,
        cache: bool = True,
        accept: Callable[[Row], int] = lambda row: row.num_tokens if row.decode else 1,
        fails: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self.kv = KVManager([GROUP], num_pages, block_size, cache)
        self.scheduler = Scheduler(
            self.kv,
            max_num_seqs=max_num_seqs,
            token_budget=token_budget,
            max_model_len=max_model_len,
            tokens_per_step=tokens_per_step,
        )
        self.worker = FakeWorker(
            num_slots=max_num_seqs,
            num_groups=1,
            num_pages=num_pages,
            block_size=block_size,
            accept=accept,
            fails=fails,
        )
        self.depth = depth
        self.requests: dict[str, Request] = {}
        self.deltas: list[RequestDelta] = []

    def add(self, name: str, prompt: list[int], *, seed: int = 0, **params: object) -> Request:
        params.setdefault("ignore_eos", True)
        spec = GenerateRequest(
            id=name,
            prompt_ids=prompt,
            params=SamplingParams(**params),  # type: ignore[arg-type]
            seed=seed,
        )
        request = Request(spec, eos_ids=EOS_IDS)
        self.scheduler.add(request)
        self.requests[name] = request
        return request

    def launch(self) -> Batch | None:
        batch = self.scheduler.schedule()
        if batch is not None:
            self.worker.launch(batch)
        self.scheduler.check()
        return batch

    def commit(self) -> list[RequestDelta]:
        deltas = self.scheduler.commit(self.worker.result())
        self.scheduler.check()
        self.deltas += deltas
        return deltas

    def step(self) -> Batch | None:
        batch = self.launch()
        while len(self.worker.in_flight) > (0 if batch is None else self.depth):
            self.commit()
        return batch

    def run(self) -> None:
        for _ in range(2000):
            if not self.scheduler.has_work:
                break
            self.step()
        assert not self.scheduler.has_work and self.kv.usage == 0.0

    def tokens(self, name: str) -> list[int]:
        return [t for delta in self.deltas if delta.request_id == name for t in delta.token_ids]

    def last(self, name: str) -> RequestDelta:
        return [delta for delta in self.deltas if delta.request_id == name][-1]

    def assert_alone(self, name: str) -> None:
        request = self.requests[name]
        assert self.tokens(name) == run_alone(request.spec, request.max_tokens)[0]


def sizes(batch: Batch | None) -> list[int]:
    return [] if batch is None else [row.num_tokens for row in batch.rows]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_one_request_from_prompt_to_length(depth: int):
    bench = Bench(depth=depth)
    bench.add("a", [1, 2, 3], max_tokens=5)
    bench.run()
    bench.assert_alone("a")
    assert bench.last("a").finish_reason is FinishReason.LENGTH
    assert bench.scheduler.stats.steps == 5, "one prefill, four decodes, no overshoot"
    assert bench.scheduler.stats.prompt_tokens == 3
    assert bench.scheduler.stats.generation_tokens == 5


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_eos_ends_and_the_overshoot_is_dropped(depth: int):
    bench = Bench(depth=depth)
    seed = next(seed for seed in range(100) if EOS in run_alone(_spec([5, 6], seed), 20)[0][2:-1])
    bench.add("a", [5, 6], seed=seed, max_tokens=20, ignore_eos=False)
    bench.run()
    last = bench.last("a")
    assert (last.finish_reason, last.stop_token) == (FinishReason.STOP, EOS)
    assert bench.tokens("a")[-1] == EOS and EOS not in bench.tokens("a")[:-1]
    assert bench.requests["a"].history[-1] is State.FINISHED


def _spec(prompt: list[int], seed: int) -> GenerateRequest:
    params = SamplingParams(ignore_eos=True)
    return GenerateRequest(id="", prompt_ids=prompt, params=params, seed=seed)


def test_stop_ids_and_min_tokens():
    bench = Bench()
    bench.add("a", [1], max_tokens=50, stop_token_ids=(1, 2, 3), min_tokens=10)
    bench.run()
    bench.assert_alone("a")
    tokens = bench.tokens("a")
    assert len(tokens) > 10 and tokens[-1] == bench.last("a").stop_token
    assert not {1, 2, 3} & set(tokens[:-1])


def test_max_tokens_zero_scores_the_prompt_only():
    bench = Bench(token_budget=3)
    bench.add("a", [1, 2, 3, 4, 5], max_tokens=0, prompt_logprobs=0)
    bench.run()
    (delta,) = bench.deltas
    assert delta.finish_reason is FinishReason.LENGTH and delta.token_ids == []
    assert delta.prompt_logprobs is not None and delta.prompt_logprobs[0] is None
    assert [entry.token_id for entry in delta.prompt_logprobs[1:] if entry] == [2, 3, 4, 5]


def test_decodes_come_first_and_a_long_prefill_progresses_beside_them():
    bench = Bench(token_budget=4)
    bench.add("a", [1], max_tokens=30)
    bench.add("b", [2], max_tokens=30)
    bench.step()
    bench.add("c", list(range(1, 7)) * 4, max_tokens=2)
    batches = [bench.step() for _ in range(12)]
    assert all(sizes(batch) == [1, 1, 2] for batch in batches)
    bench.run()
    for name in "abc":
        bench.assert_alone(name)


@pytest.mark.parametrize("token_budget", [4, 5, 8, 11])
def test_more_decodes_than_budget_take_turns(token_budget: int):
    bench = Bench(token_budget=token_budget, tokens_per_step=4, accept=lambda row: 1)
    for name in "abcd":
        bench.add(name, [ord(name) % 7], max_tokens=20)
    bench.step()
    assert all(request.state is State.DECODING for request in bench.requests.values())
    for _ in range(20):
        bench.step()
        lengths = [len(bench.tokens(name)) for name in "abcd"]
        assert max(lengths) - min(lengths) <= 1
    bench.run()


def test_a_running_prefill_keeps_its_share_of_a_full_budget():
    bench = Bench(token_budget=8, tokens_per_step=2, accept=lambda row: 1)
    for name in "abc":
        bench.add(name, [1], max_tokens=40)
    bench.add("d", [1] * 20, max_tokens=2)
    assert sizes(bench.step()) == [1, 1, 1, 5]
    batches = [bench.step() for _ in range(7)]
    assert all(sizes(batch) == [2, 2, 2, 2] for batch in batches)
    bench.add("e", [1] * 20, max_tokens=2)
    bench.run()
    bench.assert_alone("d")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_youngest_is_preempted_and_loses_nothing(depth: int):
    bench = Bench(num_pages=8, block_size=2, depth=depth, cache=False)
    for name in "abc":
        bench.add(name, [ord(name) % 5], max_tokens=13, logprobs=0)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert bench.requests["a"].num_preemptions == 0, "the oldest never makes way"
    assert bench.requests["c"].num_preemptions >= bench.requests["b"].num_preemptions
    for name in "abc":
        bench.assert_alone(name)


def test_a_returning_request_finds_its_prefix_again():
    bench = Bench(num_pages=12, block_size=2)
    bench.add("a", [1, 2], max_tokens=15)
    bench.add("b", [3, 4], max_tokens=15)
    cached = []
    while bench.scheduler.has_work:
        batch = bench.step()
        for start in batch.starts if batch else []:
            row = next(row for row in batch.rows if row.slot == start.slot)
            cached.append((len(start.token_ids), row.start))
    returned = [(known, start) for known, start in cached if known > 2]
    assert returned and any(start > 0 for _, start in returned)
    bench.assert_alone("a")
    bench.assert_alone("b")
    stats = bench.scheduler.stats
    assert (stats.prefix_queries, stats.prefix_hits) == (4, 0), "its return is no query"
    assert stats.prompt_tokens == 4


def test_no_more_are_preempted_than_the_pages_need():
    bench = Bench(num_pages=12, block_size=2, depth=1)
    for name in "abc":
        bench.add(name, [ord(name) % 5], max_tokens=20)
    while not bench.scheduler.stats.preemptions:
        bench.step()
    assert bench.requests["c"].state is State.PREEMPTED
    bench.run()
    assert bench.requests["b"].num_preemptions == 1
    assert bench.requests["c"].num_preemptions <= 2


@pytest.mark.parametrize("num_pages", range(24, 40))
def test_while_an_older_request_lacks_pages_no_younger_one_takes_any(num_pages: int):
    bench = Bench(
        num_pages=num_pages,
        block_size=1,
        tokens_per_step=4,
        depth=1,
        cache=False,
        accept=lambda row: 1 + (row.start + row.generation) % row.num_tokens * row.decode,
    )
    for name in "abcd":
        bench.add(name, [ord(name)], max_tokens=20)
    owner_of: dict[int, Request] = {}
    while bench.scheduler.has_work:
        batch = bench.step()
        if batch is None:
            continue
        for start in batch.starts:
            owner_of[start.generation] = bench.requests[chr(start.token_ids[0])]
        rowless = set(bench.requests.values()) - {owner_of[row.generation] for row in batch.rows}
        lacking = [one.order for one in rowless if one.state is State.DECODING]
        taking = [owner_of[row.generation].order for row in batch.rows if row.pages[0]]
        assert not lacking or all(order < min(lacking) for order in taking)
    for name in "abcd":
        bench.assert_alone(name)


@pytest.mark.parametrize("depth", [0, 1])
def test_prompt_logprobs_survive_preemption_once(depth: int):
    bench = Bench(num_pages=6, block_size=2, token_budget=2, depth=depth)
    bench.add("a", [1], max_tokens=9)
    while len(bench.tokens("a")) < 3 - depth:
        bench.step()
    bench.add("b", [1, 2, 3, 4, 5, 6], max_tokens=3, prompt_logprobs=0)
    while bench.requests["b"].state is not State.PREEMPTED:
        bench.step()
    known = bench.requests["b"].prompt_logprobs
    assert known is not None and 1 < len(known) < 6, "in the middle of its prefill"
    bench.run()
    found = [delta.prompt_logprobs for delta in bench.deltas if delta.request_id == "b"]
    assert found[0] is not None and all(entry is None for entry in found[1:])
    assert [entry and entry.token_id for entry in found[0]] == [None, 2, 3, 4, 5, 6]
    assert [entry and entry.logprob for entry in found[0]] == [None, -1, -2, -3, -4, -5]
    bench.assert_alone("b")


def test_cache_entries_are_shared_within_a_salt_and_an_adapter():
    bench, prompt = Bench(), [1, 2, 3, 4, 5]
    cached = []
    for salt, adapter in [("x", None), (None, None), (None, "x"), ("y", None), ("x", None)]:
        params = SamplingParams(max_tokens=1)
        spec = GenerateRequest(
            id="a", prompt_ids=prompt, params=params, cache_salt=salt, adapter=adapter
        )
        bench.scheduler.add(Request(spec))
        bench.run()
        cached.append(bench.last("a").num_cached_tokens)
    assert cached == [0, 0, 0, 0, 4]


def test_who_asks_prompt_logprobs_computes_its_prompt():
    bench, prompt = Bench(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    bench.add("a", prompt, max_tokens=1)
    bench.run()
    bench.add("b", prompt, max_tokens=1, prompt_logprobs=0)
    bench.add("c", prompt, max_tokens=1)
    bench.run()
    assert [delta.num_cached_tokens for delta in bench.deltas] == [0, 0, 8]
    assert bench.scheduler.stats.prefix_queries == 18


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_an_error_ends_its_request_alone(depth: int):
    bench = Bench(depth=depth, fails=lambda row: row.generation == 2 and row.start >= 5)
    for name in "abc":
        bench.add(name, [ord(name) % 5, 1, 2], max_tokens=8)
    bench.run()
    last = bench.last("b")
    assert (last.finish_reason, last.error) == (FinishReason.ERROR, "injected")
    bench.assert_alone("a")
    bench.assert_alone("c")
    before = bench.scheduler.stats.prefix_hits
    bench.add("d", [*bench.requests["b"].token_ids(), 1], max_tokens=8)
    bench.run()
    assert bench.scheduler.stats.prefix_hits == before, "KV of a broken request is not trusted"


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_abort_in_every_state(depth: int):
    bench = Bench(max_num_seqs=2, token_budget=4, depth=depth)
    bench.add("decoding", [1], max_tokens=50)
    bench.step()
    bench.step()
    bench.add("prefilling", [1] * 40, max_tokens=5)
    bench.step()
    bench.add("waiting", [3], max_tokens=5)
    for name in ("decoding", "prefilling", "waiting"):
        delta = bench.scheduler.abort(name)
        assert delta is not None and delta.finish_reason is FinishReason.ABORT
        assert bench.scheduler.abort(name) is None, "a second abort says nothing"
        assert bench.requests[name].state is State.ABORTED
        bench.scheduler.check()
    assert bench.scheduler.abort("unknown") is None
    bench.run()
    assert not [delta for delta in bench.deltas if delta.request_id == "prefilling"]


def test_abort_of_a_preempted_request():
    bench = Bench(num_pages=6, block_size=2, cache=False)
    bench.add("a", [1], max_tokens=11)
    bench.add("b", [2], max_tokens=11)
    while bench.requests["b"].state is not State.PREEMPTED:
        bench.step()
    assert bench.scheduler.abort("b") is not None
    bench.run()
    bench.assert_alone("a")


def test_a_slot_is_not_given_away_under_a_launched_step():
    bench = Bench(max_num_seqs=1)
    bench.add("a", [1], max_tokens=9)
    bench.launch()
    bench.launch()
    bench.scheduler.abort("a")
    bench.add("b", [2], max_tokens=2)
    assert bench.launch() is None
    bench.commit()
    assert bench.launch() is None
    bench.commit()
    assert bench.launch() is not None
    bench.commit()
    bench.run()
    bench.assert_alone("b")
    assert bench.tokens("a") == []


def test_a_step_that_accepts_nothing_is_repeated():
    rejected = iter([0, 0, 0, 1, 0, 0, *[1] * 100])
    bench = Bench(accept=lambda row: next(rejected))
    bench.add("a", [1, 2, 3, 4], max_tokens=6)
    bench.run()
    bench.assert_alone("a")
    assert [delta.token_ids for delta in bench.deltas if not delta.token_ids] == []
    assert bench.scheduler.stats.steps == 6 + 5


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("accepted", [1, 2, 4])
def test_several_tokens_a_step(depth: int, accepted: int):
    bench = Bench(
        num_pages=256,
        block_size=1,
        tokens_per_step=4,
        depth=depth,
        accept=lambda row: min(accepted, row.num_tokens) if row.decode else 1,
    )
    for name in "ab":
        bench.add(name, [ord(name) % 5] * 3, max_tokens=18, logprobs=0)
    bench.run()
    for name in "ab":
        bench.assert_alone(name)
        assert bench.last(name).finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens_per_step", [1, 4])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_the_context_can_be_filled_exactly(tokens_per_step: int, depth: int):
    bench = Bench(max_model_len=16, num_pages=4, depth=depth, tokens_per_step=tokens_per_step)
    bench.add("a", [1] * 7)
    bench.run()
    assert len(bench.tokens("a")) == 9
    with pytest.raises(InvalidRequest, match="maximum context length is 16 tokens") as caught:
        bench.add("b", [1] * 7, max_tokens=10)
    assert caught.value.code == "context_length_exceeded"


def test_what_cannot_fit_the_pool_is_refused_with_both_numbers():
    bench = Bench(num_pages=4, block_size=4, max_model_len=1000)
    with pytest.raises(InvalidRequest, match="needs 17 tokens of KV cache, but the pool has 16"):
        bench.add("a", [1] * 10, max_tokens=8)
    with pytest.raises(InvalidRequest, match="needs 17 tokens"):
        bench.add("b", [1] * 17)
    bench.add("c", [1] * 10, max_tokens=7)
    bench.add("d", [1] * 10)
    bench.run()
    assert len(bench.tokens("d")) == 7, "without max_tokens: what fits the pool"
    assert bench.scheduler.stats.num_waiting == 0


def test_empty_prompts_and_ids_in_use_are_refused():
    bench = Bench()
    with pytest.raises(InvalidRequest, match="prompt is empty"):
        bench.add("a", [])
    bench.add("a", [1], max_tokens=1)
    with pytest.raises(InvalidRequest, match="'a' is in use"):
        bench.add("a", [1], max_tokens=1)
    bench.run()
    bench.add("a", [1], max_tokens=1)
    bench.run()


def test_page_tables_reach_the_worker_in_pieces():
    bench = Bench(block_size=2)
    bench.add("a", [1, 2, 3], max_tokens=6)
    first = bench.step()
    assert first is not None and first.rows[0].page_starts == [0]
    assert len(first.rows[0].pages[0]) == 2
    grown = [bench.step() for _ in range(4)]
    pieces = [(b.rows[0].page_starts, len(b.rows[0].pages[0])) for b in grown if b]
    assert pieces == [([2], 0), ([2], 1), ([3], 0), ([3], 1)]


def test_results_come_in_launch_order():
    bench = Bench()
    bench.add("a", [1], max_tokens=9)
    bench.launch()
    bench.launch()
    bench.worker.in_flight.rotate()
    with pytest.raises(AssertionError, match="step 1 came before step 0"):
        bench.commit()
