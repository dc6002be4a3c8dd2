"""The cache facade: what is shared, what is private, and that every page is accounted for."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.kv.manager import Holding, KVManager
from tokenspeed.kv.prefix import Namespace
from tokenspeed.kv.specs import CacheGroup, FullAttention

BASE = Namespace()
SPEC = FullAttention(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0)


def make(num_pages: int, block_size: int = 2, num_groups: int = 1, cache: bool = True) -> KVManager:
    groups = [CacheGroup(SPEC, (layer,)) for layer in range(num_groups)]
    return KVManager(groups, num_pages, block_size, cache)


def acquire(kv: KVManager, tokens: list[int], **options: object) -> Holding:
    holding = kv.acquire(tokens, BASE, **options)  # type: ignore[arg-type]
    assert holding is not None
    return holding


def test_committed_pages_are_found_again() -> None:
    kv = make(10)
    first = acquire(kv, [1, 2, 3, 4, 5])
    assert first.num_cached_tokens == 0 and len(first.tables[0]) == 3
    kv.commit(first, [1, 2, 3, 4, 5], 5)
    second = acquire(kv, [1, 2, 3, 4, 9])
    assert second.num_cached_tokens == 4, "while the first still runs"
    assert second.tables[0][:2] == first.tables[0][:2]
    assert second.tables[0][2] != first.tables[0][2], "half a page is not shared"
    kv.check([first, second])
    assert (kv.prefix_queries, kv.prefix_hits) == (10, 4)


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (2, 0), (3, 2), (4, 2), (5, 4)])
def test_the_last_token_is_never_served(length: int, cached: int) -> None:
    kv, tokens = make(10), [1, 2, 3, 4, 5, 6]
    kv.release(acquire(kv, tokens), tokens, 6)
    assert acquire(kv, tokens[:length]).num_cached_tokens == cached


def test_only_committed_tokens_enter_the_tree() -> None:
    kv = make(10)
    tokens = [1, 2, 3, 4, 5, 6]
    kv.release(acquire(kv, tokens), tokens, 3)
    assert acquire(kv, [*tokens, 7]).num_cached_tokens == 2


def test_namespaces_do_not_share() -> None:
    kv, tokens = make(20), [1, 2, 3]
    kv.release(acquire(kv, tokens), tokens, 3)
    for space in (Namespace(salt="x"), Namespace(adapter="x"), Namespace(salt="")):
        holding = kv.acquire(tokens, space)
        assert holding is not None and holding.num_cached_tokens == 0
        kv.release(holding, tokens, 3)
    again = kv.acquire(tokens, Namespace(adapter="x"))
    assert again is not None and again.num_cached_tokens == 2


def test_who_may_not_read_may_still_write() -> None:
    kv, tokens = make(10), [1, 2, 3]
    kv.release(acquire(kv, tokens, read_prefix=False), tokens, 3)
    assert acquire(kv, tokens, read_prefix=False).num_cached_tokens == 0
    assert (kv.prefix_queries, kv.prefix_hits) == (0, 0)
    assert acquire(kv, tokens, is_counted=False).num_cached_tokens == 2
    assert (kv.prefix_queries, kv.prefix_hits) == (0, 0)


def test_without_prefix_caching_nothing_is_kept() -> None:
    kv, tokens = make(4, cache=False), [1, 2, 3]
    holding = acquire(kv, tokens)
    kv.commit(holding, tokens, 3)
    kv.release(holding, tokens, 3)
    assert acquire(kv, tokens).num_cached_tokens == 0
    assert kv.num_available == 2


def test_twins_keep_their_own_pages() -> None:
    kv, tokens = make(10), [1, 2, 3, 4, 5]
    first, second = acquire(kv, tokens), acquire(kv, tokens)
    table = list(second.tables[0])
    kv.commit(first, tokens, 5)
    kv.commit(second, tokens, 5)
    assert second.tables[0] == table and second.num_shared == 0
    kv.check([first, second])
    kv.release(second, [*tokens, 6], 6)  # two pages twice, the third is new
    kv.release(first, tokens, 5)
    assert acquire(kv, [*tokens, 6, 7]).num_cached_tokens == 6
    assert kv.num_available == kv.num_pages - 4


def test_a_refused_allocation_changes_nothing() -> None:
    kv = make(4)
    holding = acquire(kv, [1, 2, 3])
    assert kv.acquire([9] * 5, BASE) is None
    assert kv.acquire([9] * 4, BASE, num_spare=1) is None
    assert not kv.can_allocate(holding, 9) and not kv.allocate(holding, 9)
    assert kv.can_allocate(holding, 8) and len(holding.tables[0]) == 2
    kv.check([holding])
    assert kv.allocate(holding, 8) and kv.usage == 1.0
    kv.check([holding])


def test_cached_pages_make_way_but_not_those_in_use() -> None:
    kv = make(4)
    kv.release(acquire(kv, [1, 2, 3, 4]), [1, 2, 3, 4], 4)
    kv.release(acquire(kv, [5, 6]), [5, 6], 2)
    assert kv.usage == 0.0
    reader = acquire(kv, [1, 2, 9])
    assert acquire(kv, [7, 7, 7, 7]).num_cached_tokens == 0
    assert kv.usage == 1.0
    kv.release(reader)
    assert acquire(kv, [1, 2, 8]).num_cached_tokens == 2


def test_returning_pages_are_counted() -> None:
    kv, tokens = make(10), [1, 2, 3, 4, 5]
    first = acquire(kv, tokens)
    kv.commit(first, tokens, 5)
    assert kv.num_returning(first) == 3
    second = acquire(kv, [1, 2, 9])
    assert kv.num_returning(first) == 2, "the first page has a second reader"
    kv.release(second)
    before = kv.num_available
    kv.release(first, tokens, 5)
    assert kv.num_available == before + 3


def test_needed_pages_are_those_that_nobody_else_holds() -> None:
    kv, tokens = make(6), [1, 2, 3]
    first = acquire(kv, tokens)
    kv.commit(first, tokens, 3)
    assert kv.num_needed([1, 2, 3, 4], Namespace()) == 1
    assert kv.num_needed([1, 2, 3, 4], Namespace(), read_prefix=False) == 2
    kv.release(first, tokens, 3)
    assert kv.num_needed([1, 2, 3, 4], Namespace()) == 2, "cached, but available to all"


def test_a_lost_holding_is_noticed() -> None:
    kv = make(4)
    acquire(kv, [1])
    with pytest.raises(AssertionError, match="a lost holding"):
        kv.check([])


@dataclass(eq=False)
class Live:
    holding: Holding
    tokens: list[int]
    num_computed: int


class ManagerMachine(RuleBasedStateMachine):
    """`content` is what a model would have written: the prefix whose KV a (group, page) holds."""

    @initialize(
        num_pages=st.integers(2, 14),
        block_size=st.integers(1, 3),
        num_groups=st.integers(1, 2),
        cache=st.booleans(),
    )
    def start(self, num_pages: int, block_size: int, num_groups: int, cache: bool) -> None:
        self.kv = make(num_pages, block_size, num_groups, cache)
        self.live: list[Live] = []
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        spare=st.integers(0, 2),
        read=st.booleans(),
    )
    def acquire(self, tokens: list[int], spare: int, read: bool) -> None:
        before = self.kv.num_available
        holding = self.kv.acquire(tokens, BASE, num_spare=spare, read_prefix=read)
        if holding is None:
            assert self.kv.num_available == before
            return
        assert holding.num_cached_tokens < len(tokens)
        self.live.append(Live(holding, tokens, holding.num_cached_tokens))
        for index in range(holding.num_shared):
            for group, table in enumerate(holding.tables):
                wanted = tuple(tokens[: (index + 1) * self.kv.block_size])
                assert self.content[group, table[index]] == wanted, "a wrong prefix"

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        live = data.draw(st.sampled_from(self.live))
        end = data.draw(st.integers(live.num_computed, len(live.tokens)))
        size = self.kv.block_size
        for position in range(live.num_computed, end):
            for group, table in enumerate(live.holding.tables):
                page = table[position // size]
                self.content[group, page] = tuple(live.tokens[: position + 1])
        live.num_computed = end
        if data.draw(st.booleans()):
            self.kv.commit(live.holding, live.tokens, end)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), min_size=1, max_size=6))
    def grow(self, data: st.DataObject, more: list[int]) -> None:
        live = data.draw(st.sampled_from(self.live))
        can = self.kv.can_allocate(live.holding, len(live.tokens) + len(more))
        assert self.kv.allocate(live.holding, len(live.tokens) + len(more)) == can
        if can:
            live.tokens = live.tokens + more

    @precondition(lambda self: self.live)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data: st.DataObject, keep: bool) -> None:
        live = data.draw(st.sampled_from(self.live))
        self.live.remove(live)
        promised = self.kv.num_available + self.kv.num_returning(live.holding)
        self.kv.release(live.holding, live.tokens, live.num_computed if keep else 0)
        assert self.kv.num_available >= promised

    @precondition(lambda self: not self.live)
    @rule()
    def reset(self) -> None:
        assert self.kv.usage == 0.0
        self.kv._evict(self.kv._tree.num_cached)
        self.content.clear()

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check(live.holding for live in self.live)
        size = self.kv.block_size
        for live in self.live:  # nobody wrote over a computed page
            for index in range(live.num_computed // size):
                for group, table in enumerate(live.holding.tables):
                    wanted = tuple(live.tokens[: (index + 1) * size])
                    assert self.content[group, table[index]] == wanted, "a page was overwritten"


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
