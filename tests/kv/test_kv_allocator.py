"""The page allocator: consecutive where possible, never twice, never lost."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.kv.allocator import PageAllocator


def test_fresh_pages_are_consecutive() -> None:
    allocator = PageAllocator(10)
    assert allocator.allocate(4) == [0, 1, 2, 3]
    assert allocator.num_free == 6


def test_growth_continues_behind_the_last_page() -> None:
    allocator = PageAllocator(32)
    first = allocator.allocate(4, room=8)
    second = allocator.allocate(4, room=8)
    assert second == [12, 13, 14, 15], "the room of the first was given away"
    assert allocator.allocate(2, after=first[-1]) == [4, 5]
    assert allocator.allocate(2, after=second[-1]) == [16, 17]


def test_room_is_a_wish() -> None:
    allocator = PageAllocator(8)
    assert allocator.allocate(3, room=1000) == [0, 1, 2]
    assert sorted(allocator.allocate(5, room=1000)) == [3, 4, 5, 6, 7]


def test_a_blocked_owner_moves_to_a_run() -> None:
    allocator = PageAllocator(10)
    first, second = allocator.allocate(2), allocator.allocate(2)
    assert allocator.allocate(3, after=first[-1]) == [4, 5, 6]
    assert allocator.allocate(2, after=second[-1]) == [7, 8], "page 4 belongs to somebody"


def test_scattered_pages_are_found_longest_run_first() -> None:
    allocator = PageAllocator(9)
    allocator.allocate(9)
    allocator.free([0, 2, 3, 4, 6, 8])
    assert allocator.allocate(3) == [2, 3, 4]
    assert sorted(allocator.allocate(3)) == [0, 6, 8]
    assert allocator.num_free == 0


def test_misuse_is_noticed() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    with pytest.raises(AssertionError, match="3 pages asked, 2 free"):
        allocator.allocate(3)
    with pytest.raises(AssertionError, match="two writers"):
        allocator.check([pages, pages[:1]])
    with pytest.raises(AssertionError, match="without an owner"):
        allocator.check([pages[:1]])
    allocator.free(pages)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.free(pages[:1])


class AllocatorMachine(RuleBasedStateMachine):
    @initialize(num_pages=st.integers(1, 40))
    def start(self, num_pages: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self.owned: list[list[int]] = []

    @rule(data=st.data(), room=st.integers(0, 12), grow=st.booleans())
    def allocate(self, data: st.DataObject, room: int, grow: bool) -> None:
        count = data.draw(st.integers(0, self.allocator.num_free))
        if not grow or not self.owned:
            self.owned.append([])
        owner = data.draw(st.sampled_from(self.owned)) if grow else self.owned[-1]
        pages = self.allocator.allocate(count, owner[-1] if owner else None, room)
        assert len(pages) == count and all(0 <= p < self.allocator.num_pages for p in pages)
        owner.extend(pages)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free_some(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(self.owned))
        keep = data.draw(st.integers(0, len(owner)))
        self.allocator.free(owner[keep:])
        del owner[keep:]

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "allocator"):
            self.allocator.check(self.owned)
            taken = sum(len(pages) for pages in self.owned)
            assert self.allocator.num_free == self.allocator.num_pages - taken


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, derandomize=True
)
