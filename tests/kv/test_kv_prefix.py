"""The prefix tree against a naive model: a dict from token tuples to pages."""

from __future__ import annotations

import sys
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tokenspeed.kv.prefix import Namespace, Node, PrefixTree

BASE = Namespace()


def insert(tree: PrefixTree, tokens: list[int], pages: list[int], space: Namespace = BASE) -> int:
    """Enter a run as a request would: locked at the root meanwhile. Returns pages already there."""
    root = tree.root(space)
    tree.lock(root)
    present, _ = tree.insert(root, tokens, [pages])
    tree.unlock(root)
    return present


def found(tree: PrefixTree, tokens: list[int], space: Namespace = BASE) -> list[int]:
    node = tree.match(space, tokens, len(tokens))
    tree.lock(node)
    tree.unlock(node)
    return tree.path_pages(node)[0]


def test_match_is_the_longest_page_aligned_prefix() -> None:
    tree = PrefixTree(1, 2)
    assert insert(tree, [1, 2, 3, 4, 5, 6], [10, 11, 12]) == 0
    assert found(tree, [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert found(tree, [1, 2, 3, 4, 5]) == [10, 11]
    assert found(tree, [1, 2, 3, 9, 5, 6]) == [10], "half a page does not count"
    assert found(tree, [2, 3]) == found(tree, [1]) == found(tree, []) == []


def test_a_run_already_there_stays_the_newcomers() -> None:
    tree = PrefixTree(1, 1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    assert insert(tree, [1, 2, 3], [5, 6, 7]) == 3
    assert insert(tree, [1, 2, 9], [5, 6, 8]) == 2
    assert found(tree, [1, 2, 9]) == [0, 1, 8]
    assert tree.num_cached == 4


def test_namespaces_of_equal_text_differ() -> None:
    tree = PrefixTree(1, 1)
    insert(tree, [1, 2], [0, 1], Namespace(salt="x"))
    assert found(tree, [1, 2]) == []
    assert found(tree, [1, 2], Namespace(adapter="x")) == []
    assert found(tree, [1, 2], Namespace(salt="y")) == []
    assert found(tree, [1, 2], Namespace(salt="")) == []
    assert found(tree, [1, 2], Namespace(salt="x")) == [0, 1]


def test_eviction_is_leaf_first_and_least_recently_used() -> None:
    tree = PrefixTree(1, 1)
    insert(tree, [1, 2, 3], [0, 1, 2])
    insert(tree, [1, 2, 4], [0, 1, 3])
    insert(tree, [7, 8], [4, 5])
    found(tree, [1, 2, 3])
    assert tree.evict(1) == [[3]], "the leaf used longest ago"
    assert tree.evict(1) == [[5]], "a long leaf gives its last page"
    assert sorted(tree.evict(99)[0]) == [0, 1, 2, 4]
    assert tree.num_cached == tree.num_evictable == 0
    tree.check(Counter())


def test_what_grew_last_is_evicted_last() -> None:
    tree = PrefixTree(1, 1)
    insert(tree, [1], [0])
    insert(tree, [7, 8], [1, 2])
    insert(tree, [1, 2, 3], [9, 3, 4])  # grows the older leaf
    assert tree.evict(2) == [[1, 2]]
    tree.check(Counter())


def test_a_lock_protects_the_path_alone() -> None:
    tree = PrefixTree(1, 1)
    insert(tree, [1, 2, 3, 4], [0, 1, 2, 3])
    node = tree.match(BASE, [1, 2], 2)
    tree.lock(node)
    assert tree.num_evictable == 2
    assert sorted(tree.evict(99)[0]) == [2, 3]
    assert tree.num_locked_once(node) == 2
    tree.unlock(node)
    assert sorted(tree.evict(99)[0]) == [0, 1]


def test_chunks_of_one_request_make_one_node() -> None:
    tree = PrefixTree(1, 1)
    node = tree.root(BASE)
    tree.lock(node)
    for chunk in range(5):
        _, end = tree.insert(node, [chunk, chunk], [[2 * chunk, 2 * chunk + 1]])
        if end is not node:
            tree.lock(end)
            tree.unlock(node)
        node = end
    assert len(node.tokens) == 10 and node.parent is tree.root(BASE)
    tree.check(Counter([node]))


def test_a_deep_tree_needs_no_recursion() -> None:
    tree, depth = PrefixTree(1, 1), sys.getrecursionlimit() + 200
    insert(tree, [0] * depth, list(range(depth)))
    for page in reversed(range(depth)):  # a fork in front of each page
        insert(tree, [0] * page + [1], [*range(page), depth + page])
    assert found(tree, [0] * depth) == list(range(depth))
    tree.check(Counter())
    assert sorted(tree.evict(2 * depth)[0]) == list(range(2 * depth))


def test_salts_leave_nothing_behind() -> None:
    tree = PrefixTree(1, 1)
    for salt in range(100):
        insert(tree, [1], [salt], Namespace(salt=str(salt)))
        found(tree, [2], Namespace(salt=f"unused {salt}"))
    tree.evict(100)
    tree.check(Counter())  # fails on a root without use
    assert found(tree, [1], Namespace(salt="3")) == []


TOKENS = st.lists(st.integers(0, 1), max_size=8)
SPACES = st.sampled_from([BASE, BASE, BASE, BASE, Namespace(salt="x"), Namespace(adapter="x")])


class PrefixMachine(RuleBasedStateMachine):
    """`pages` maps (namespace, whole-page prefix) to that prefix's last page of each group."""

    @initialize(num_groups=st.integers(1, 3), block_size=st.integers(1, 3))
    def start(self, num_groups: int, block_size: int) -> None:
        self.size = block_size
        self.num_groups = num_groups
        self.tree = PrefixTree(num_groups, block_size)
        self.pages: dict[tuple[Namespace, tuple[int, ...]], list[int]] = {}
        self.locks: list[tuple[Node, Namespace, tuple[int, ...]]] = []
        self.next_page = 0
        self.ages: dict[tuple[Namespace, tuple[int, ...]], int] = {}
        self.clock = 0

    def touch(self, space: Namespace, prefixes: list[tuple[int, ...]]) -> None:
        self.clock += 1
        self.ages |= {(space, prefix): self.clock for prefix in prefixes}

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(self.size, len(tokens) + 1, self.size)
        return [tuple(tokens[:end]) for end in ends]

    def expected(self, space: Namespace, tokens: list[int]) -> list[list[int]]:
        path: list[list[int]] = []
        for prefix in self.prefixes(tokens):
            if (space, prefix) not in self.pages:
                break
            path.append(self.pages[space, prefix])
        return [[pages[group] for pages in path] for group in range(self.num_groups)]

    def lock(self, space: Namespace, tokens: list[int], limit: int) -> Node:
        node = self.tree.match(space, tokens, limit)
        self.tree.lock(node)
        wanted = self.expected(space, tokens[:limit])
        assert self.tree.path_pages(node) == wanted
        self.locks.append((node, space, tuple(tokens[: len(wanted[0]) * self.size])))
        return node

    @rule(space=SPACES, tokens=TOKENS, data=st.data())
    def match(self, space: Namespace, tokens: list[int], data: st.DataObject) -> None:
        self.lock(space, tokens, data.draw(st.integers(0, len(tokens))))

    @rule(space=SPACES, tokens=TOKENS, data=st.data())
    def insert(self, space: Namespace, tokens: list[int], data: st.DataObject) -> None:
        """A reader of some prefix enters what it computed behind it."""
        node = self.lock(space, tokens, data.draw(st.integers(0, len(tokens))))
        start = len(self.locks[-1][2])
        prefixes = self.prefixes(tokens)[start // self.size :]
        run = tokens[start : start + len(prefixes) * self.size]
        new = [[self.next_page + i for i in range(self.num_groups)] for _ in prefixes]
        for pages in new:
            for group in range(self.num_groups):
                pages[group] = self.next_page
                self.next_page += 1
        before = len(self.expected(space, list(tokens))[0]) - start // self.size
        if not prefixes:
            return
        columns = [[pages[group] for pages in new] for group in range(self.num_groups)]
        present, _ = self.tree.insert(node, run, columns)
        assert present == before
        self.touch(space, prefixes)
        self.locks.pop()
        self.tree.unlock(node)
        self.touch(space, self.prefixes(tokens[:start]))
        for prefix, pages in list(zip(prefixes, new, strict=True))[present:]:
            self.pages[space, prefix] = pages

    @precondition(lambda self: self.locks)
    @rule(data=st.data())
    def unlock(self, data: st.DataObject) -> None:
        lock = data.draw(st.sampled_from(self.locks))
        self.locks.remove(lock)
        self.tree.unlock(lock[0])
        self.touch(lock[1], self.prefixes(list(lock[2])))

    @rule(count=st.integers(0, 6))
    def evict(self, count: int) -> None:
        evicted = self.tree.evict(count)
        protected = {
            (space, prefix) for _, space, path in self.locks for prefix in self.prefixes(list(path))
        }
        evictable = len(self.pages) - len(protected)
        assert len(evicted[0]) == min(count, evictable)
        newest = 0
        keys = {tuple(pages): key for key, pages in self.pages.items()}
        for pages in zip(*evicted, strict=True):
            key = keys[pages]
            assert key not in protected, "a locked page was evicted"
            del self.pages[key]
            newest = max(newest, self.ages[key])
        parents = {(space, prefix[: -self.size]) for space, prefix in self.pages}
        leaves = self.pages.keys() - parents - protected
        assert all(self.ages[leaf] >= newest for leaf in leaves), "not the longest unused"
        for space, prefix in self.pages:  # leaf first: no page outlives its parent
            assert all((space, tuple(up)) in self.pages for up in self.prefixes(list(prefix)))

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "tree"):
            return
        columns = self.tree.check(Counter(node for node, _, _ in self.locks))
        for group, pages in enumerate(columns):
            assert sorted(pages) == sorted(p[group] for p in self.pages.values())
        for node, space, tokens in self.locks:
            assert self.tree.path_pages(node) == self.expected(space, list(tokens))


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, derandomize=True
)
