"""The prefix cache: a radix tree over page-aligned runs of tokens, for a list of cache groups.

    namespace -> root --- [t0 .. t31] --- [t32 .. t47]        one list of pages a group in each node
                                      \\-- [u32 .. u95]

A node's run is a whole number of pages; children are found by the tokens of their first page, so
tokens are compared on every hit and hashes cannot collide. Only committed pages come in. A reader
locks the node at which its prefix ends: that node and its ancestors stay. What nobody has locked is
evicted page by page from the ends of leaves, the longest unused first. No walk recurses.

With full-attention groups alone every node can serve every group, so the longest match is the
longest path. A group that keeps less (window, recurrent state) narrows `match`, not its callers.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Namespace:
    """Prefixes are shared within one namespace only. Each kind of key is a field of its own, so an
    adapter and a salt of the same text differ.
    """

    adapter: str | None = None
    salt: str | None = None


@dataclass(slots=True, eq=False)
class Node:
    """A run of tokens and its pages. `refs` counts the locks on this node and below it."""

    parent: Node | None
    tokens: list[int]
    pages: list[list[int]]
    """pages[g][i] holds tokens i * block_size and on, for cache group g."""
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    refs: int = 0
    used_at: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.pages[0])


class PrefixTree:
    """Owns the pages of committed prefixes until `evict` gives them back."""

    def __init__(self, num_groups: int, block_size: int) -> None:
        assert num_groups > 0, "a prefix tree needs a cache group"
        self.num_cached = 0
        """Blocks in the tree: pages of each group."""
        self.num_evictable = 0
        """Those that no lock protects."""
        self.num_entered = 0
        """Blocks that came in so far: while it stays the same, no prefix grows."""
        self._num_groups = num_groups
        self._block_size = block_size
        self._roots: dict[Namespace, Node] = {}
        self._namespace_of: dict[Node, Namespace] = {}
        self._num_nodes = 0
        self._clock = itertools.count(1)
        self._ties = itertools.count()
        # Leaves by last use. An entry is stale once its node is no unlocked leaf of that age.
        self._leaves: list[tuple[int, int, Node]] = []

    def root(self, namespace: Namespace) -> Node:
        node = self._roots.get(namespace)
        if node is None:
            node = Node(None, [], [[] for _ in range(self._num_groups)])
            self._roots[namespace] = node
            self._namespace_of[node] = namespace
        return node

    def match(self, namespace: Namespace, tokens: list[int], limit: int) -> Node:
        """Where the longest cached prefix of `tokens`, of at most `limit` tokens, ends. The caller
        locks it.
        """
        return self._descend(self.root(namespace), tokens, limit)[0]

    def path_pages(self, node: Node) -> list[list[int]]:
        """The pages from the root to the end of `node`: a list a group."""
        path = [node]
        while path[-1].parent is not None:
            path.append(path[-1].parent)
        return [
            [page for step in reversed(path) for page in step.pages[group]]
            for group in range(self._num_groups)
        ]

    def lock(self, node: Node) -> None:
        """Keep `node` and its ancestors until as many `unlock`s."""
        step: Node | None = node
        while step is not None:
            if step.refs == 0:
                self.num_evictable -= step.num_blocks
            step.refs += 1
            step = step.parent

    def unlock(self, node: Node) -> None:
        now = next(self._clock)
        step: Node | None = node
        while step is not None:
            assert step.refs > 0, "a node was unlocked more often than locked"
            step.refs -= 1
            step.used_at = now
            if step.refs == 0:
                self.num_evictable += step.num_blocks
                self._offer(step)
            step = step.parent

    def num_locked_once(self, node: Node) -> int:
        """Blocks up to the end of `node` that a single lock protects."""
        count, step = 0, node
        while step.refs == 1 and step.parent is not None:
            count += step.num_blocks
            step = step.parent
        return count

    def has_next(self, node: Node, page_tokens: Sequence[int]) -> bool:
        """Whether a page with these tokens stands right behind `node`."""
        return tuple(page_tokens) in node.children

    def insert(self, node: Node, tokens: list[int], pages: Sequence[list[int]]) -> tuple[int, Node]:
        """Enter `tokens` (whole pages) with their pages behind `node`, which the caller has locked.

        Returns how many leading pages of each group were there already (the tree keeps its own,
        the newcomer's stay the caller's; all others are the tree's now) and the run's last node.
        """
        size, start = self._block_size, node
        assert len(tokens) == size * len(pages[0]), "pages and tokens differ in length"
        node, position = self._descend(node, tokens, len(tokens))
        present = position // size
        if position == len(tokens):
            self._touch(node, start)
            return present, node
        run, run_pages = tokens[position:], [group[present:] for group in pages]
        num_blocks = len(run_pages[0])
        self.num_cached += num_blocks
        self.num_entered += num_blocks
        # A leaf that nobody else has locked grows in place, so chunks do not leave a chain.
        others = node.refs - 1 if node is start else node.refs
        if node.parent is not None and not node.children and others == 0:
            node.tokens.extend(run)
            for mine, new in zip(node.pages, run_pages, strict=True):
                mine.extend(new)
        else:
            parent, node = node, Node(node, run, run_pages)
            parent.children[tuple(run[:size])] = node
            self._num_nodes += 1
        if node.refs == 0:
            self.num_evictable += num_blocks
        self._touch(node, start)
        return present, node

    def evict(self, count: int) -> list[list[int]]:
        """Give back up to `count` pages of each group, from the leaves used longest ago."""
        evicted: list[list[int]] = [[] for _ in range(self._num_groups)]
        while len(evicted[0]) < count and self._leaves:
            used_at, _, node = heapq.heappop(self._leaves)
            if not self._is_evictable(node) or node.used_at != used_at:
                continue
            keep = max(0, node.num_blocks - (count - len(evicted[0])))
            for pages, group in zip(evicted, node.pages, strict=True):
                pages.extend(group[keep:])
            self.num_cached -= node.num_blocks - keep
            self.num_evictable -= node.num_blocks - keep
            if keep:
                self._trim(node, keep)
            else:
                self._remove(node)
        return evicted

    def num_locked(self, node: Node) -> int:
        """Blocks up to the end of `node` that some lock protects."""
        count, step = 0, node
        while step.parent is not None:
            count += step.num_blocks if step.refs else 0
            step = step.parent
        return count

    def check(self, locks: Counter[Node]) -> list[list[int]]:
        """Prove the tree's invariants, given how often each node is locked. Returns its pages."""
        size = self._block_size
        pages: list[list[int]] = [[] for _ in range(self._num_groups)]
        offered = {node for used_at, _, node in self._leaves if node.used_at == used_at}
        num_evictable = num_nodes = 0
        for node in self._nodes():
            is_root = node.parent is None
            num_nodes += not is_root
            num_evictable += node.num_blocks * (node.refs == 0)
            below = sum(child.refs for child in node.children.values())
            assert node.refs == locks[node] + below, f"{node.refs} refs, {locks[node]} + {below}"
            assert len(node.tokens) == size * node.num_blocks, "a run is not page-aligned"
            assert is_root == (node.num_blocks == 0), "an empty node"
            assert not is_root or node.refs or node.children, "a root without use"
            assert not self._is_evictable(node) or node in offered, "a leaf was not offered"
            for group, more in zip(pages, node.pages, strict=True):
                assert len(more) == node.num_blocks, "groups differ in length"
                group.extend(more)
            for key, child in node.children.items():
                assert child.parent is node and tuple(child.tokens[:size]) == key, "a wrong link"
        assert num_nodes == self._num_nodes, f"{num_nodes} nodes, {self._num_nodes} counted"
        assert len(pages[0]) == self.num_cached, "cached pages miscounted"
        assert num_evictable == self.num_evictable, "evictable pages miscounted"
        assert all(count == 0 or self._is_reachable(node) for node, count in locks.items())
        return pages

    def _touch(self, node: Node, above: Node) -> None:
        """What stands between `above` and the end of `node` is used now."""
        now, step = next(self._clock), node
        while step is not above:
            assert step.parent is not None, "not below"
            step.used_at, step = now, step.parent
        self._offer(node)

    def _descend(self, node: Node, tokens: list[int], limit: int) -> tuple[Node, int]:
        """Follow `tokens[:limit]` below `node`, splitting the node in which they leave the tree."""
        size, position = self._block_size, 0
        while position + size <= limit:
            child = node.children.get(tuple(tokens[position : position + size]))
            if child is None:
                break
            end = min(limit // size * size, position + len(child.tokens))
            length = self._common(child.tokens, tokens[position:end])
            node = child if length == len(child.tokens) else self._split(child, length)
            position += length
        return node, position

    def _common(self, run: list[int], tokens: list[int]) -> int:
        """Tokens of the common prefix, in whole pages. `tokens` is no longer than `run`."""
        if run[: len(tokens)] == tokens:
            return len(tokens)
        size, length = self._block_size, 0
        while run[length : length + size] == tokens[length : length + size]:
            length += size
        return length

    def _split(self, node: Node, length: int) -> Node:
        """Cut the first `length` tokens of `node` off into a parent of its own, returned. Locks end
        at the end of `node`, which stays the same object.
        """
        size, parent = self._block_size, node.parent
        assert parent is not None and 0 < length < len(node.tokens)
        blocks = length // size
        upper = Node(parent, node.tokens[:length], [group[:blocks] for group in node.pages])
        upper.refs, upper.used_at = node.refs, node.used_at
        parent.children[tuple(node.tokens[:size])] = upper
        self._trim_front(node, blocks)
        node.parent = upper
        upper.children[tuple(node.tokens[:size])] = node
        self._num_nodes += 1
        return upper

    def _trim_front(self, node: Node, blocks: int) -> None:
        del node.tokens[: blocks * self._block_size]
        for group in node.pages:
            del group[:blocks]

    def _trim(self, node: Node, blocks: int) -> None:
        """Shorten a leaf to its first `blocks` pages."""
        del node.tokens[blocks * self._block_size :]
        for group in node.pages:
            del group[blocks:]
        self._offer(node)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[tuple(node.tokens[: self._block_size])]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and node.refs == 0 and not node.children

    def _offer(self, node: Node) -> None:
        """Note that `node` may be evicted, if so; forget a root that serves nobody."""
        if self._is_evictable(node):
            heapq.heappush(self._leaves, (node.used_at, next(self._ties), node))
            if len(self._leaves) > 4 * self._num_nodes + 64:
                leaves = [leaf for leaf in self._nodes() if self._is_evictable(leaf)]
                self._leaves = [(leaf.used_at, next(self._ties), leaf) for leaf in leaves]
                heapq.heapify(self._leaves)
        elif node.refs == 0 and not node.children and node in self._namespace_of:
            del self._roots[self._namespace_of.pop(node)]

    def _nodes(self) -> Iterator[Node]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _is_reachable(self, node: Node) -> bool:
        while node.parent is not None:
            node = node.parent
        return node in self._namespace_of
