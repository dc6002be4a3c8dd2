"""The scheduler's promises about what is scarce: pages, slots, and the prefixes in the cache."""

from __future__ import annotations

import pytest
from scheduler_bench import Bench

from tokenspeed.engine.record import Request, State
from tokenspeed.request import GenerateRequest, SamplingParams


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_the_youngest_is_preempted_and_loses_nothing(depth: int) -> None:
    bench = Bench(num_pages=8, block_size=2, depth=depth, cache=False)
    for name in "abc":
        bench.add(name, [ord(name) % 5], max_tokens=13, logprobs=0)
    bench.run()
    assert bench.scheduler.stats.preemptions > 0
    assert bench.requests["a"].num_preemptions == 0, "the oldest never makes way"
    assert bench.requests["c"].num_preemptions >= bench.requests["b"].num_preemptions
    for name in "abc":
        bench.assert_alone(name)


def test_a_returning_request_finds_its_prefix_again() -> None:
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


def test_no_more_are_preempted_than_the_pages_need() -> None:
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
def test_while_an_older_request_lacks_pages_no_younger_one_takes_any(num_pages: int) -> None:
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
def test_prompt_logprobs_survive_preemption_once(depth: int) -> None:
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


def test_cache_entries_are_shared_within_a_salt_and_an_adapter() -> None:
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


def test_who_asks_prompt_logprobs_computes_its_prompt() -> None:
    bench, prompt = Bench(), [1, 2, 3, 4, 5, 6, 1, 2, 3]
    bench.add("a", prompt, max_tokens=1)
    bench.run()
    bench.add("b", prompt, max_tokens=1, prompt_logprobs=0)
    bench.add("c", prompt, max_tokens=1)
    bench.run()
    assert [delta.num_cached_tokens for delta in bench.deltas] == [0, 0, 8]
    assert bench.scheduler.stats.prefix_queries == 18


def test_abort_of_a_preempted_request() -> None:
    bench = Bench(num_pages=6, block_size=2, cache=False)
    bench.add("a", [1], max_tokens=11)
    bench.add("b", [2], max_tokens=11)
    while bench.requests["b"].state is not State.PREEMPTED:
        bench.step()
    assert bench.scheduler.abort("b") is not None
    bench.run()
    bench.assert_alone("a")


def test_a_slot_is_not_given_away_under_a_launched_step() -> None:
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


def test_a_request_of_full_length_fits_the_pool() -> None:
    with pytest.raises(AssertionError, match="has to fit the pool"):
        Bench(num_pages=4, block_size=4, max_model_len=17)
    bench = Bench(num_pages=4, block_size=4, max_model_len=16)
    bench.add("a", [1] * 10, max_tokens=6)
    bench.add("b", [2] * 10)
    bench.run()
    assert len(bench.tokens("b")) == 6, "without max_tokens: what fits"
    bench.assert_alone("a")


def test_page_tables_reach_the_worker_in_pieces() -> None:
    bench = Bench(block_size=2)
    bench.add("a", [1, 2, 3], max_tokens=6)
    first = bench.step()
    assert first is not None and first.rows[0].page_starts == [0]
    assert len(first.rows[0].pages[0]) == 2
    grown = [bench.step() for _ in range(4)]
    pieces = [(b.rows[0].page_starts, len(b.rows[0].pages[0])) for b in grown if b]
    assert pieces == [([2], 0), ([2], 1), ([3], 0), ([3], 1)]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_head_without_pages_is_not_looked_up_every_step(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(num_pages=16, block_size=2, depth=depth)
    bench.add("a", [1, 2], max_tokens=22)
    bench.step()
    bench.add("long", [3] * 30, max_tokens=1)
    asked: list[int] = []
    acquire = bench.kv.acquire

    def counting(tokens: list[int], *args: object, **kwargs: object) -> object:
        asked.append(len(tokens))
        return acquire(tokens, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(bench.kv, "acquire", counting)
    bench.run()
    # In vain, again when pages of "a" have entered the cache, and when the pages were there.
    assert asked.count(30) == 2 + depth
    bench.assert_alone("a")
    bench.assert_alone("long")


def test_a_head_without_pages_comes_in_when_its_prefix_grows() -> None:
    """What it misses may shrink without a page becoming free."""
    bench = Bench(num_pages=10, block_size=1)
    bench.add("a", [1, 2, 3, 4, 5, 6], max_tokens=4)
    bench.add("b", [1, 2, 3, 4, 5, 6], max_tokens=1)
    bench.step()
    assert bench.scheduler.stats.num_running == 1
    bench.step()
    assert bench.requests["b"].num_cached_tokens == 5
    bench.run()
    bench.assert_alone("b")


def test_the_last_in_rank_is_preempted_though_it_is_the_oldest() -> None:
    bench = Bench(num_pages=8, block_size=2, cache=False)
    for name, priority in (("a", 7), ("b", -7), ("c", 0)):
        bench.add(name, [ord(name) % 5], max_tokens=13, priority=priority)
    bench.run()
    preemptions = [bench.requests[name].num_preemptions for name in "bca"]
    assert preemptions[0] == 0 < preemptions[2] and preemptions == sorted(preemptions)
    for name in "abc":
        bench.assert_alone(name)


@pytest.mark.parametrize("priority", [-3, 1])
def test_whoever_waits_is_let_in_by_rank_and_sends_none_of_its_rank_away(priority: int) -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("running", [1], max_tokens=5, priority=priority)
    bench.step()
    for name, others in (("c", 1), ("a", priority), ("d", 1), ("b", max(priority, 0))):
        bench.add(name, [2], max_tokens=2, priority=others)
    bench.run()
    ended = [delta.request_id for delta in bench.deltas if delta.finish_reason]
    by_arrival = ["running", "c", "a", "d", "b"]
    assert ended == (by_arrival if priority == 1 else ["running", "a", "b", "c", "d"])
    assert bench.scheduler.stats.preemptions == 0


def ends(bench: Bench) -> list[str]:
    return [delta.request_id for delta in bench.deltas if delta.finish_reason]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_higher_priority_takes_the_slot_of_the_last_in_rank(depth: int) -> None:
    bench = Bench(max_num_seqs=2, depth=depth)
    for name, priority in (("low", 9), ("mid", 5)):
        bench.add(name, [ord(name[0]) % 5], max_tokens=20, priority=priority)
    for _ in range(4):
        bench.step()
    bench.add("high", [2], max_tokens=2, priority=-1)
    bench.run()
    assert ends(bench) == ["high", "mid", "low"]
    preemptions = {name: each.num_preemptions for name, each in bench.requests.items()}
    assert preemptions == {"low": 1, "mid": 0, "high": 0}
    for name in bench.requests:
        bench.assert_alone(name)


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("cache", [False, True])
def test_a_higher_priority_takes_as_many_pages_as_it_lacks(depth: int, cache: bool) -> None:
    """Of the last in rank; who is not needed for that goes on."""
    bench = Bench(num_pages=40, block_size=2, token_budget=32, depth=depth, cache=cache)
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(name, [ord(name) % 5] * 6, max_tokens=8, priority=priority)
    for _ in range(3):
        bench.step()
    bench.add("high", [6] * 52, max_tokens=1, priority=0)
    while bench.requests["high"].state is State.WAITING:
        bench.step()
    states = [bench.requests[name].state for name in "abc"]
    assert states == [State.DECODING, State.DECODING, State.PREEMPTED]
    bench.run()
    assert [bench.requests[name].num_preemptions for name in "abc"] == [0, 0, 1]
    for name in bench.requests:
        bench.assert_alone(name)


def test_nobody_is_sent_away_in_vain() -> None:
    """What those of lower priority hold would not let it in: it waits for others."""
    bench = Bench(num_pages=16, block_size=2)
    bench.add("equal", [1] * 20, max_tokens=6)
    bench.add("low", [2] * 4, max_tokens=4, priority=1)
    for _ in range(3):
        bench.step()
    bench.add("high", [3] * 20, max_tokens=1)
    bench.run()
    assert bench.requests["low"].num_preemptions == 0
    assert ends(bench).index("low") < ends(bench).index("high")
    for name in bench.requests:
        bench.assert_alone(name)


def test_a_lower_priority_that_lacks_pages_holds_up_no_higher_one() -> None:
    """Which comes in when it has asked and the last step of whoever made way has ended."""
    bench = Bench(num_pages=9, block_size=2, depth=1, cache=False, max_num_seqs=5)
    for name, priority in (("a", 1), ("b", 2), ("c", 3)):
        bench.add(name, [ord(name) % 5] * 2, max_tokens=14, priority=priority)
    while not bench.scheduler.stats.preemptions:
        bench.step()
    bench.add("high", [4], max_tokens=1, priority=0)
    for _ in range(3):
        bench.step()
    assert bench.requests["high"].state is not State.WAITING
    bench.run()
    for name in bench.requests:
        bench.assert_alone(name)


@pytest.mark.parametrize("parked", ["a", "b", "c"])
def test_whoever_is_parked_is_away_wherever_it_stood_in_rank(parked: str) -> None:
    bench = Bench(max_num_seqs=3)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        bench.add(name, [ord(name) % 5], max_tokens=6, priority=priority)
    bench.step()
    bench.step()
    assert all(bench.requests[name].state is State.DECODING for name in "abc")
    for name, priority in (("x", -1), ("y", 3)):
        bench.add(name, [2], max_tokens=2, priority=priority)
    request = bench.scheduler.park(parked)
    assert request is bench.requests[parked]
    bench.scheduler.check()
    bench.step()
    bench.scheduler.add(request)
    bench.run()
    for name in "abcxy":
        bench.assert_alone(name)
